# A C++20 compiler, and ccache if it is there.
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

find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
endif()
