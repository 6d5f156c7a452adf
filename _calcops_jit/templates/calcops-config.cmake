# find_package(calcops) gives the target calcops::calcops, PyTorch's libraries and headers included, and one for each
# other exported library, such as calcops::calcops_models. It does not use PyTorch's own package, which fails where a CUDA
# build of PyTorch meets no CUDA toolkit.
#
#   calcops_TORCH   PyTorch's folder, the one that holds version.py; default: where it was at the export, else python3's
cmake_minimum_required(VERSION 3.18)
if(NOT calcops_TORCH AND EXISTS "@torch@/version.py")
  set(calcops_TORCH "@torch@")
elseif(NOT calcops_TORCH)
  execute_process(
    COMMAND python3 -c "import importlib.util as i; print(i.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE calcops_TORCH OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
set(_calcops_found "")
if(EXISTS "${calcops_TORCH}/version.py")
  file(STRINGS "${calcops_TORCH}/version.py" _calcops_found REGEX "^__version__ = ")
endif()
if(NOT _calcops_found MATCHES "'@release@['+]")
  set(calcops_FOUND FALSE)
  set(calcops_NOT_FOUND_MESSAGE "calcops was built for PyTorch @release@, not for that in '${calcops_TORCH}' \
(${_calcops_found}): name its folder with -Dcalcops_TORCH=...")
  return()
endif()
get_filename_component(_calcops_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET calcops::calcops)
  add_library(calcops::calcops INTERFACE IMPORTED)
  target_compile_features(calcops::calcops INTERFACE cxx_std_@standard@)
  target_include_directories(calcops::calcops INTERFACE "${_calcops_prefix}/include" "${calcops_TORCH}/include"
    "${calcops_TORCH}/include/torch/csrc/api/include")
  target_link_directories(calcops::calcops INTERFACE "${calcops_TORCH}/lib" "${_calcops_prefix}/lib")
  # As in calcops.pc, which says why.
  target_link_options(calcops::calcops INTERFACE "LINKER:-rpath,${calcops_TORCH}/lib"
    "LINKER:-rpath,${_calcops_prefix}/lib" "LINKER:--allow-shlib-undefined")
  target_link_libraries(calcops::calcops INTERFACE
    "-Wl,--push-state,--no-as-needed @libraries@ -lcalcops -Wl,--pop-state")
endif()
foreach(_calcops_library @names@)
  if(NOT TARGET calcops::${_calcops_library})
    add_library(calcops::${_calcops_library} INTERFACE IMPORTED)
    target_link_libraries(calcops::${_calcops_library} INTERFACE calcops::calcops
      "-Wl,--push-state,--no-as-needed -l${_calcops_library} -Wl,--pop-state")
  endif()
endforeach()
