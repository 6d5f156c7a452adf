// Every C++ source includes this file first. GCC uses a precompiled header only in the first place,
// and does not list the headers in it as read.
