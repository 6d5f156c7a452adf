// What every library that registers operators is linked with, compiled once for each PyTorch: the
// one unit that includes PyTorch's headers, since reading these takes most of its time.
#include "registry.cpp"
//
#include "autograd.cpp"
//
#include "contract.cpp"
