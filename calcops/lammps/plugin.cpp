// SPDX-License-Identifier: GPL-2.0-or-later
//
// The plugin that LAMMPS loads. It opens the library of the pair style and registers it.
//
// liblammps.so exports the reference BLAS that it was built with. Without RTLD_DEEPBIND, PyTorch
// would call this dgemm_ instead of that of MKL.
#include <dlfcn.h>

#include "error.h"
#include "input.h"
#include "lammps.h"
#include "pair.h"
#include "variable.h"

using namespace LAMMPS_NS;

// As in LAMMPS's src/lammpsplugin.h, which is not in its wheel.
struct lammpsplugin_t {
  const char *version, *style, *name, *info, *author;
  Pair* (*creator)(LAMMPS*);
  void* handle;
};

extern "C" __attribute__((visibility("default"))) void lammpsplugin_init(void* lammps, void* handle,
                                                                         void* registrar) {
  auto* const lmp = static_cast<LAMMPS*>(lammps);
  void* const library = dlopen("libpair_calcops.so", RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  if (!library) {
    lmp->error->warning(FLERR, "Pair style calcops: {}", dlerror());
    return;
  }
  lammpsplugin_t plugin{nullptr,  // the version: any
                        "pair",
                        "calcops",
                        "PyTorch models as pair style calcops",
                        "the CalcOps developers",
                        reinterpret_cast<Pair* (*)(LAMMPS*)>(dlsym(library, "new_pair_calcops")),
                        handle};
  reinterpret_cast<void (*)(lammpsplugin_t*, void*)>(registrar)(&plugin, lmp);
  // A failed `plugin load` is no error in LAMMPS, so scripts test is_defined(variable,calcops).
  char loaded[] = "calcops";
  Variable* const variable = lmp->input->variable;
  if (variable->find(loaded) < 0) variable->internal_create(loaded, 1);
}
