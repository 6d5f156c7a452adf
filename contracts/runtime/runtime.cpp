// A library that registers operators is linked with this unit. One object for each PyTorch serves
// every library of the cache. Half of the compile time is PyTorch's headers, so the four parts are
// one unit. The empty comments keep clang-format from sorting the files.
#include "registry.cpp"
//
#include "contract.cpp"
//
#include "describe.cpp"
//
#include "value.cpp"
