// What every library that registers operators is linked with: the one unit that includes PyTorch's
// headers. Reading these takes half of its time, so its three parts are one unit, which is compiled
// once for each PyTorch and serves every library of the cache.
#include "registry.cpp"
//
#include "autograd.cpp"
//
#include "contract.cpp"
