#include "bindings/bindings.hpp"

namespace {

struct BuildInfo {
  const char* version = KVXFER_VERSION;
  const char* compiler = KVXFER_COMPILER;
  bool has_cuda = KVXFER_HAVE_CUDA != 0;
  const char* cuda_version = KVXFER_CUDA_VERSION;
  const char* cuda_architectures = KVXFER_CUDA_ARCHITECTURES;
};

}  // namespace

PYBIND11_MODULE(_core, module) {
  using namespace kvxfer::bindings;
  module.doc() = "The native core of kvxfer. Private: use the rooms of the package.";
  py::class_<BuildInfo>(module, "BuildInfo", "How this core was built.")
      .def_readonly("version", &BuildInfo::version)
      .def_readonly("compiler", &BuildInfo::compiler)
      .def_readonly("has_cuda", &BuildInfo::has_cuda)
      .def_readonly("cuda_version", &BuildInfo::cuda_version)
      .def_readonly("cuda_architectures", &BuildInfo::cuda_architectures);
  module.def("build_info", [] { return BuildInfo{}; });
  register_errors(module);
  register_memory(module);
  register_copy(module);
  register_device(module);
  register_lists(module);
  register_ucx(module);
}
