# Finds the XLA FFI headers that jaxlib ships and refuses those newer than the oldest supported
# runtime's: an older runtime rejects a library that was built against a newer minor version.
set(DIRECTKV_FFI_API_MINOR_MAX 3)  # jaxlib 0.10.2

execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import jaxlib, os; print(os.path.join(os.path.dirname(jaxlib.__file__), 'include'), end='')"
  OUTPUT_VARIABLE XLA_FFI_INCLUDE_DIR
  RESULT_VARIABLE _result
  ERROR_VARIABLE _error)
set(_header "${XLA_FFI_INCLUDE_DIR}/xla/ffi/api/c_api.h")
if(NOT _result EQUAL 0 OR NOT EXISTS "${_header}")
  message(FATAL_ERROR "The XLA FFI headers come with jaxlib, which ${Python_EXECUTABLE} cannot import: ${_error}")
endif()

file(STRINGS "${_header}" _minor REGEX "#define XLA_FFI_API_MINOR [0-9]+")
string(REGEX MATCH "[0-9]+$" XLA_FFI_API_MINOR "${_minor}")
if(XLA_FFI_API_MINOR GREATER DIRECTKV_FFI_API_MINOR_MAX)
  set(_text "These XLA FFI headers have API 0.${XLA_FFI_API_MINOR}; the oldest supported jaxlib (0.10.2) has 0.${DIRECTKV_FFI_API_MINOR_MAX} and would refuse the library")
  if(DIRECTKV_ALLOW_NEWER_FFI)
    message(STATUS "${_text}. Allowed: this build is for the jaxlib at hand.")
  else()
    message(FATAL_ERROR "${_text}. Build with jaxlib==0.10.2 (pip does, in its build environment), or for this machine alone with -C cmake.define.DIRECTKV_ALLOW_NEWER_FFI=ON.")
  endif()
endif()
