// What a library with contracts or derivatives is linked with. One object for each PyTorch serves
// every library of the cache. Half of its compile time is PyTorch's headers, so the three parts are
// one unit. A library that only has TORCH_LIBRARY is linked with registry.cpp alone.
#include "registry.cpp"
//
#include "autograd.cpp"
//
#include "contract.cpp"
//
#include "value.cpp"
