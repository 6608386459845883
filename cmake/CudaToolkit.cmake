# Decides whether the CUDA kernels are built, and says why not.
#
# nvcc is looked for in CUDACXX, under CUDA_HOME, on PATH, and in the PyPI packages of this Python.
set(DIRECTKV_CUDA_FOUND FALSE)
set(DIRECTKV_CUDA_MINIMUM 12.8)  # the first to know sm_100

if(DIRECTKV_CUDA STREQUAL "OFF")
  set(DIRECTKV_CUDA_MESSAGE "no (DIRECTKV_CUDA=OFF)")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER AND DEFINED ENV{CUDACXX})
  set(CMAKE_CUDA_COMPILER "$ENV{CUDACXX}")
endif()
if(NOT CMAKE_CUDA_COMPILER)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import glob, site, sys; print(';'.join(p for s in site.getsitepackages() + sys.path for p in glob.glob(s + '/nvidia/*/bin')), end='')"
    OUTPUT_VARIABLE _wheel_dirs)
  find_program(DIRECTKV_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin)
  find_program(DIRECTKV_NVCC nvcc PATHS ${_wheel_dirs} /usr/local/cuda/bin NO_DEFAULT_PATH)
  if(DIRECTKV_NVCC)
    set(CMAKE_CUDA_COMPILER "${DIRECTKV_NVCC}")
  endif()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  set(_reason "nvcc was not found on PATH, under CUDA_HOME or in a PyPI package")
else()
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE _version)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" _match "${_version}")
  set(_release "${CMAKE_MATCH_1}")
  if(NOT _release OR _release VERSION_LESS DIRECTKV_CUDA_MINIMUM)
    set(_reason "${CMAKE_CUDA_COMPILER} is release '${_release}', older than ${DIRECTKV_CUDA_MINIMUM}")
  endif()
endif()

if(CMAKE_CUDA_COMPILER MATCHES "/nvidia/[^/]+/bin/nvcc$")
  # The PyPI compiler alone (JAX's CUDA extras bring it) lacks headers that come in other packages.
  get_filename_component(_root "${CMAKE_CUDA_COMPILER}" DIRECTORY)
  get_filename_component(_root "${_root}" DIRECTORY)
  find_path(DIRECTKV_CCCL nv/target PATHS ${_root}/include ${_root}/include/cccl NO_DEFAULT_PATH)
  find_file(DIRECTKV_CUDART libcudart_static.a PATHS ${_root}/lib NO_DEFAULT_PATH)
  if(NOT DIRECTKV_CCCL OR NOT DIRECTKV_CUDART)
    set(_reason "the PyPI nvcc is not complete; pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl")
  endif()
endif()

if(_reason)
  set(DIRECTKV_CUDA_MESSAGE "no (${_reason})")
  if(DIRECTKV_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DIRECTKV_CUDA=ON, but ${_reason}.")
  endif()
  return()
endif()

if(NOT CMAKE_CUDA_ARCHITECTURES)
  # Ampere, Hopper, Blackwell, and PTX for what comes next.
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100-real;90-virtual")
endif()
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)  # the wheel runs beside jax[cuda12] and jax[cuda13]
enable_language(CUDA)
set(DIRECTKV_CUDA_FOUND TRUE)
set(DIRECTKV_CUDA_MESSAGE "yes (nvcc ${_release}, architectures ${CMAKE_CUDA_ARCHITECTURES})")
