#include "transport/shm/ptrace_consent.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <iterator>

#include "tessera/error.h"
#include "transport/testing.h"

namespace tessera {
namespace {

using transport_testing::Child;

// From now on each prctl(PR_SET_PTRACER, `tracer`) of this process fails with `error`; all others work as before.
bool refuse_ptracer(uint32_t tracer, uint32_t error) {
  constexpr uint32_t kOption = offsetof(seccomp_data, args), kTracer = kOption + sizeof(uint64_t);
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_prctl, 0, 5),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kOption),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, PR_SET_PTRACER, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kTracer),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, tracer, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

constexpr uint32_t kAnyone = UINT32_MAX;  // the low half of PR_SET_PTRACER_ANY
constexpr uint32_t kNobody = 0;

// Whether `body` makes the call: it then fails with an errno that nothing else here sets.
template <typename Body>
bool asks_the_kernel(uint32_t tracer, Body body) {
  Child child([&] {
    if (!refuse_ptracer(tracer, EXDEV)) return 2;
    errno = 0;
    body();  // no cleanup needed: the process ends here
    return errno == EXDEV ? 1 : 0;
  });
  const int outcome = child.wait();
  EXPECT_LT(outcome, 2) << "the filter could not be installed";
  return outcome == 1;
}

TEST(PtraceConsent, TheKernelIsAskedOnlyWithTheOption) {
  EXPECT_FALSE(asks_the_kernel(kAnyone, [] { const PtraceConsent consent(""); }));
  EXPECT_FALSE(asks_the_kernel(kNobody, [] { const PtraceConsent consent(""); }));
  EXPECT_TRUE(asks_the_kernel(kAnyone, [] { new PtraceConsent("any"); }));
}

TEST(PtraceConsent, WithTheLastHolderItIsWithdrawn) {
  EXPECT_TRUE(asks_the_kernel(kNobody, [] { const PtraceConsent consent("any"); }));
  EXPECT_FALSE(asks_the_kernel(kNobody, [] {
    static const PtraceConsent other("any");
    const PtraceConsent consent("any");
  }));
}

TEST(PtraceConsent, AForkedChildGivesItsOwn) {
  const PtraceConsent parents("any");
  EXPECT_TRUE(asks_the_kernel(kAnyone, [] { new PtraceConsent("any"); }));
  EXPECT_FALSE(asks_the_kernel(kNobody, [&] { parents.~PtraceConsent(); }));
}

TEST(PtraceConsent, AnUnknownOptionIsNamed) {
  try {
    const PtraceConsent consent("peer");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_STREQ(error.what(), "TESSERA_ALLOW_PTRACE is \"peer\": it must be any");
  }
}

}  // namespace
}  // namespace tessera
