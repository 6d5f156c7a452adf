// A library with contracts is linked with this unit and with registry.cpp. One object for each
// PyTorch serves every library of the cache. Half of the compile time is PyTorch's headers, so the
// two parts are one unit. A library that only has TORCH_LIBRARY is linked with registry.cpp
// alone. The empty comments keep clang-format from sorting the files.
#include "contract.cpp"
//
#include "value.cpp"
