# RE2, regular expressions in linear time and bounded stack: re2::re2.
find_path(RE2_INCLUDE_DIR re2/re2.h)
find_library(RE2_LIBRARY re2)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(re2 REQUIRED_VARS RE2_LIBRARY RE2_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "install libre2-dev")
if(re2_FOUND AND NOT TARGET re2::re2)
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(RE2PC QUIET IMPORTED_TARGET re2)
  endif()
  if(TARGET PkgConfig::RE2PC)  # newer releases stand on Abseil: pkg-config knows its libraries
    add_library(re2::re2 INTERFACE IMPORTED)
    target_link_libraries(re2::re2 INTERFACE PkgConfig::RE2PC)
  else()
    add_library(re2::re2 UNKNOWN IMPORTED)
    set_target_properties(re2::re2 PROPERTIES IMPORTED_LOCATION ${RE2_LIBRARY}
      INTERFACE_INCLUDE_DIRECTORIES ${RE2_INCLUDE_DIR})
  endif()
endif()
mark_as_advanced(RE2_INCLUDE_DIR RE2_LIBRARY)
