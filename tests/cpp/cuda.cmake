# C++ tests of the CUDA kernels and the host pool. Included after csrc/cuda, or from a project that
# adds it:
#   directkv_cuda_tests [--quick] [name]   on a GPU; --quick for compute-sanitizer
#   directkv_host_pool_tests [name]        on a GPU, and without one (the refusals)
#   directkv_cuda_emulated_tests[_sm80] --quick   the same kernels on the CPU, no GPU needed
set(_tests ${CMAKE_CURRENT_LIST_DIR})
set(_kernels ${CMAKE_CURRENT_LIST_DIR}/../../csrc)
set(_cuda_includes ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})

add_executable(directkv_cuda_tests
  ${_tests}/attend_case.cc
  ${_tests}/cuda_attend_test.cc
  ${_tests}/cuda_chunk_test.cc
  ${_tests}/cuda_device_case.cc
  ${_tests}/cuda_graph_test.cc
  ${_tests}/cuda_main.cc
  ${_tests}/cuda_pages_test.cc
  ${_tests}/cuda_project_test.cc)
add_executable(directkv_host_pool_tests
  ${_tests}/host_pool_limit_test.cc
  ${_tests}/host_pool_test.cc
  ${_tests}/main.cc
  ${_tests}/buffer_registry_test.cc
  ${_kernels}/buffer_registry.cc)
add_executable(attend_sweep ${_tests}/../../benchmarks/cuda/attend_sweep.cu)
foreach(target directkv_cuda_tests directkv_host_pool_tests attend_sweep)
  target_include_directories(${target} SYSTEM PRIVATE ${_cuda_includes})
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
  target_link_libraries(${target} PRIVATE directkv_cuda_kernels)
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Static LINKER_LANGUAGE CUDA)
endforeach()

# The kernels' own sources, by the host compiler.
set(_emulated_kernels)
foreach(name append attend attend_bf16 attend_f16 attend_f32 chunk device_limits page_copy
             project tile_map)
  set(_copy ${CMAKE_CURRENT_BINARY_DIR}/emulated/${name}.cc)
  file(CONFIGURE OUTPUT ${_copy} CONTENT "#include \"cuda/${name}.cu\"\n")
  list(APPEND _emulated_kernels ${_copy})
endforeach()
# Twice: with bulk copies, and as a small GPU of compute capability 8 has it.
foreach(part "" _sm80)
  add_executable(directkv_cuda_emulated_tests${part}
    ${_emulated_kernels}
    ${_tests}/attend_case.cc
    ${_tests}/cuda_attend_test.cc
    ${_tests}/cuda_chunk_test.cc
    ${_tests}/cuda_device_case.cc
    ${_tests}/cuda_emulation.cc
    ${_tests}/cuda_emulation_copies.cc
    ${_tests}/cuda_main.cc
    ${_tests}/cuda_pages_test.cc
    ${_tests}/cuda_project_test.cc)
  target_compile_features(directkv_cuda_emulated_tests${part} PRIVATE cxx_std_17)
  target_compile_definitions(directkv_cuda_emulated_tests${part} PRIVATE
    DIRECTKV_EMULATE_CUDA DIRECTKV_SM90A=1)
  target_include_directories(directkv_cuda_emulated_tests${part} PRIVATE ${_tests} ${_kernels})
  target_include_directories(directkv_cuda_emulated_tests${part} SYSTEM PRIVATE ${_cuda_includes})
  # They carry pragmas of nvcc.
  target_compile_options(directkv_cuda_emulated_tests${part} PRIVATE -Wno-unknown-pragmas)
endforeach()
target_compile_definitions(directkv_cuda_emulated_tests_sm80 PRIVATE DIRECTKV_EMULATE_SM80)

enable_testing()
add_test(NAME directkv_cuda_emulated_tests COMMAND directkv_cuda_emulated_tests --quick)
add_test(NAME directkv_cuda_emulated_tests_sm80
  COMMAND directkv_cuda_emulated_tests_sm80 --quick every_instance)
add_test(NAME directkv_host_pool_tests COMMAND directkv_host_pool_tests)
