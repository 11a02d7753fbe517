#include "kernels.inl"

namespace paceline {
const Kernels* avx2_kernels() { return &kKernels; }
}  // namespace paceline
