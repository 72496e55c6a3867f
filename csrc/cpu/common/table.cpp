// The table of one instruction set's kernels. Compiled once for each.
#include "cpu/common/kernels.h"

namespace quire {
namespace QUIRE_ISA {

const Kernels kernels = {
    linear,
    paged_attention,
    embedding,
    rms_norm,
    layer_norm,
    rotary,
    activation,
    write_kv,
    clamped_swiglu,
    xielu,
    add,
    scale,
    join_heads,
    route,
    sort_by_expert,
    grouped_linear,
    combine,
    causal_conv,
    selective_scan,
    gated_norm,
    unpacked_linear,
    quantized_embedding,
    unpacked_grouped_linear,
    likeliest,
    sum_rows,
    packs_rows,
    pack_rows,
};

}  // namespace QUIRE_ISA
}  // namespace quire
