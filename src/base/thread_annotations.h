// Annotations that tell the compiler what a lock guards. Clang checks them (-Wthread-safety, an error in
// scripts/lint.sh); other compilers ignore them. The names are those of
// https://clang.llvm.org/docs/ThreadSafetyAnalysis.html.
//
//   Mutex mutex_;
//   int64_t count_ GUARDED_BY(mutex_) = 0;      // touched only while mutex_ is held
//   void add_locked() REQUIRES(mutex_);          // the caller holds it
//   void add() EXCLUDES(mutex_);                 // the caller does not hold it: add() takes it
//
// The check works function by function, and a lambda is a separate function: a predicate that reads guarded data says
// so, `[this]() REQUIRES(mutex_) { return count_ > 0; }`. Constructors and destructors are not checked.
#pragma once

#if defined(__clang__)
#define TESSERA_THREAD_ANNOTATION(attribute) __attribute__((attribute))
#else
#define TESSERA_THREAD_ANNOTATION(attribute)
#endif

// For types: a lock, and an object that holds one while it lives.
#define CAPABILITY(name) TESSERA_THREAD_ANNOTATION(capability(name))
#define SCOPED_CAPABILITY TESSERA_THREAD_ANNOTATION(scoped_lockable)

// For members: they, or what they point to, are touched only while the lock is held.
#define GUARDED_BY(lock) TESSERA_THREAD_ANNOTATION(guarded_by(lock))
#define PT_GUARDED_BY(lock) TESSERA_THREAD_ANNOTATION(pt_guarded_by(lock))

// For locks that are members: the order in which they are taken.
#define ACQUIRED_AFTER(...) TESSERA_THREAD_ANNOTATION(acquired_after(__VA_ARGS__))
#define ACQUIRED_BEFORE(...) TESSERA_THREAD_ANNOTATION(acquired_before(__VA_ARGS__))

// For functions: the caller holds the lock, or does not; the function takes it, or releases it.
#define REQUIRES(...) TESSERA_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) TESSERA_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) TESSERA_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define ACQUIRE_SHARED(...) TESSERA_THREAD_ANNOTATION(acquire_shared_capability(__VA_ARGS__))
#define RELEASE(...) TESSERA_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define RELEASE_SHARED(...) TESSERA_THREAD_ANNOTATION(release_shared_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) TESSERA_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define RETURN_CAPABILITY(lock) TESSERA_THREAD_ANNOTATION(lock_returned(lock))

// For functions that are correct although the check cannot see it; a comment gives the reason.
#define NO_THREAD_SAFETY_ANALYSIS TESSERA_THREAD_ANNOTATION(no_thread_safety_analysis)
