# Helpers that every CMakeLists.txt of the project uses.
#
#   tessera_layer(NAME plan DEPS layout [PUBLIC fmt::fmt] [PRIVATE re2::re2] SOURCES a.cc b.cc)
#   tessera_test(NAME plan_test LABEL unit [DEPS plan] SOURCES a_test.cc)

function(tessera_compile_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wconversion -Wshadow)
  if(TESSERA_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)  # what a source keeps to itself is in an included file then
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
  if(TESSERA_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer
                                             -fno-sanitize-recover=all)
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
  tessera_compile_options(${target})
  set_property(GLOBAL APPEND PROPERTY TESSERA_LAYERS ${target})
endfunction()

# One label an executable: gtest_discover_tests keeps only the first of several.
function(tessera_test)
  cmake_parse_arguments(ARG "" "NAME;LABEL;TIMEOUT" "DEPS;LIBS;SOURCES;ENVIRONMENT" ${ARGN})
  if(NOT TESSERA_BUILD_TESTS)
    return()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${ARG_NAME} ${ARG_SOURCES})
  target_include_directories(${ARG_NAME} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
  list(TRANSFORM ARG_DEPS PREPEND tessera_)
  target_link_libraries(${ARG_NAME} PRIVATE ${ARG_DEPS} ${ARG_LIBS} GTest::gmock GTest::gtest_main)
  tessera_compile_options(${ARG_NAME})
  gtest_discover_tests(${ARG_NAME} DISCOVERY_MODE PRE_TEST
    PROPERTIES LABELS ${ARG_LABEL} TIMEOUT ${ARG_TIMEOUT} ENVIRONMENT "${ARG_ENVIRONMENT}")
endfunction()
