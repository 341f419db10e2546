# Helpers that every CMakeLists.txt of the project uses.
#
#   tessera_layer(NAME plan DEPS layout [PUBLIC fmt::fmt] [PRIVATE re2::re2] SOURCES a.cc b.cc)
#   tessera_test(NAME plan_test LABEL unit [BRUTE_FORCE] [THREADED none] [DEPS plan] SOURCES a_test.cc)

function(tessera_compile_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wconversion -Wshadow)
  if(CMAKE_CXX_COMPILER_ID STREQUAL Clang)  # what GCC's -Wconversion and -Wextra leave out; libstdc++'s own stable_sort
    target_compile_options(${target} PRIVATE -Wno-sign-conversion -Wno-missing-designated-field-initializers
                                             -Wno-deprecated-declarations)
  endif()
  if(TESSERA_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)  # what a source keeps to itself is in an included file then
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)  # at -O3, GCC 12 warns of code inside std::string and std::vector
    target_compile_options(${target} PRIVATE
      "$<$<CONFIG:Release>:-Wno-array-bounds;-Wno-maybe-uninitialized;-Wno-restrict;-Wno-stringop-overflow>")
  endif()
  if(TESSERA_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer
                                             -fno-sanitize-recover=all)
    if(TESSERA_SANITIZE MATCHES address)  # which sees these itself; they take a third of the compiler's time
      target_compile_options(${target} PRIVATE -fno-sanitize=null,vptr,object-size)
    endif()
    target_link_options(${target} PRIVATE -fsanitize=${TESSERA_SANITIZE})
  endif()
endfunction()

# One static library a layer, so that a wrong arrow between layers fails to link as well as to lint.
function(tessera_layer)
  cmake_parse_arguments(ARG "" "NAME" "DEPS;PUBLIC;PRIVATE;SOURCES" ${ARGN})
  set(target tessera_${ARG_NAME})
  add_library(${target} STATIC ${ARG_SOURCES})
  add_library(tessera::${ARG_NAME} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${ARG_NAME})
  target_include_directories(${target}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR}/src)
  list(TRANSFORM ARG_DEPS PREPEND tessera_)
  target_link_libraries(${target} PUBLIC ${ARG_DEPS} ${ARG_PUBLIC} PRIVATE ${ARG_PRIVATE})
  target_compile_features(${target} PUBLIC cxx_std_20)
  tessera_compile_options(${target})
  set_property(GLOBAL APPEND PROPERTY TESSERA_LAYERS ${target})
endfunction()

# A test, or a part of tests. Unless it goes through all elements, to compile takes longer than to run.
function(tessera_test_options target brute_force)
  if(NOT brute_force)
    target_compile_options(${target} PRIVATE $<IF:$<CONFIG:Debug>,-O0,-O1>)
  endif()
  if(TESSERA_SANITIZE MATCHES fuzzer)  # what is fuzzed is counted, and tests are not
    target_compile_options(${target} PRIVATE -fno-sanitize=fuzzer-no-link)
  endif()
  if(TESSERA_SANITIZE MATCHES address AND CMAKE_CXX_COMPILER_ID STREQUAL Clang)  # GCC says so itself
    target_compile_definitions(${target} PRIVATE __SANITIZE_ADDRESS__)
  endif()
endfunction()

# One label an executable: gtest_discover_tests keeps only the first of several. BRUTE_FORCE: what goes through all
# elements, and is slow unless optimised. THREADED: GoogleTest's filter of those that say something to
# ThreadSanitizer, as they start threads, of many kernels with one; or none.
function(tessera_test)
  cmake_parse_arguments(ARG "BRUTE_FORCE" "NAME;LABEL;TIMEOUT;THREADED" "DEPS;LIBS;SOURCES;ENVIRONMENT" ${ARGN})
  if(NOT TESSERA_BUILD_TESTS OR (ARG_LABEL STREQUAL slow AND NOT TESSERA_BUILD_SLOW_TESTS))
    return()
  endif()
  if(TESSERA_TESTS AND NOT ARG_NAME IN_LIST TESSERA_TESTS)
    return()
  endif()
  set(filter)
  if(TESSERA_SANITIZE MATCHES thread AND ARG_THREADED STREQUAL none)
    return()
  elseif(TESSERA_SANITIZE MATCHES thread AND ARG_THREADED)
    set(filter TEST_FILTER ${ARG_THREADED})
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(CMAKE_CROSSCOMPILING)  # an emulator takes several times as long
    math(EXPR ARG_TIMEOUT "5 * ${ARG_TIMEOUT}")
  elseif(TESSERA_SANITIZE)
    math(EXPR ARG_TIMEOUT "3 * ${ARG_TIMEOUT}")
  endif()
  add_executable(${ARG_NAME} ${ARG_SOURCES})
  target_include_directories(${ARG_NAME} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
  list(TRANSFORM ARG_DEPS PREPEND tessera_)
  target_link_libraries(${ARG_NAME} PRIVATE ${ARG_DEPS} ${ARG_LIBS} GTest::gmock GTest::gtest_main)
  tessera_compile_options(${ARG_NAME})
  tessera_test_options(${ARG_NAME} ${ARG_BRUTE_FORCE})
  gtest_discover_tests(${ARG_NAME} DISCOVERY_MODE PRE_TEST ${filter}
    PROPERTIES LABELS ${ARG_LABEL} TIMEOUT ${ARG_TIMEOUT} ENVIRONMENT "${ARG_ENVIRONMENT}")
endfunction()
