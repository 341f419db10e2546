# A C++20 compiler, and ccache if it is there. What is compiled does not depend on where the project lies: a cache
# that has seen one clone knows all others, and a build in a folder that pip makes up.
include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  message(FATAL_ERROR "Tessera cannot be built here: there is no C++ compiler.\n"
    "  Debian, Ubuntu:  apt install g++\n"
    "  Fedora:          dnf install gcc-c++\n"
    "or set CXX to one. A wheel needs none: see Install in README.md.")
endif()
enable_language(CXX)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR "Tessera cannot be built with GCC ${CMAKE_CXX_COMPILER_VERSION}, which lacks parts of C++20: "
    "install GCC 11 or later, and set CXX to it")
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
add_compile_options(-ffile-prefix-map=${PROJECT_SOURCE_DIR}=.)

find_program(CCACHE ccache)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Called ccache as well: clang's tools skip a launcher of that name.
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/ccache @ONLY CONTENT [[#!/bin/sh
CCACHE_BASEDIR='@PROJECT_SOURCE_DIR@' CCACHE_NOHASHDIR=1 exec '@CCACHE@' "$@"
]])
  file(CHMOD ${PROJECT_BINARY_DIR}/ccache PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${PROJECT_BINARY_DIR}/ccache)
endif()
