// Included first by sources that only describe operators and pass calls on. They have no loops that
// GCC could make faster, and compile in 70 % of the time.
#pragma once

#if defined(__OPTIMIZE__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O1")
#endif
