// What every instruction set provides: one function per kernel.
#pragma once

#include "arguments.h"

namespace quire {

// How many times what a number of a table's row takes, one of a packed table's takes to be looked up.
constexpr int64_t kPackedLookUp = 8;

struct Kernels {
  void (*linear)(const LinearArgs&);
  void (*paged_attention)(const AttentionArgs&);
  void (*embedding)(const EmbeddingArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*layer_norm)(const NormArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*activation)(const ActivationArgs&);
  void (*write_kv)(const WriteKvArgs&);
  void (*clamped_swiglu)(const ClampedSwigluArgs&);
  void (*xielu)(const XieluArgs&);
  void (*add)(const AddArgs&);
  void (*scale)(const ScaleArgs&);
  void (*join_heads)(const JoinHeadsArgs&);
  void (*route)(const RouteArgs&);
  void (*sort_by_expert)(const SortByExpertArgs&);
  void (*grouped_linear)(const GroupedLinearArgs&);
  void (*combine)(const CombineArgs&);
  void (*causal_conv)(const CausalConvArgs&);
  void (*selective_scan)(const SelectiveScanArgs&);
  void (*gated_norm)(const GatedNormArgs&);
  void (*unpacked_linear)(const LinearArgs&);
  void (*quantized_embedding)(const EmbeddingArgs&);
  void (*unpacked_grouped_linear)(const GroupedLinearArgs&);
  void (*likeliest)(const LikeliestArgs&);
  void (*sum_rows)(const SumRowsArgs&);
  bool (*packs_rows)(DType);
  void (*pack_rows)(const PackArgs&);
};

// Defined by the files that are compiled once for each instruction set.
#ifdef QUIRE_ISA
namespace QUIRE_ISA {
void linear(const LinearArgs&);
void paged_attention(const AttentionArgs&);
void embedding(const EmbeddingArgs&);
void rms_norm(const NormArgs&);
void layer_norm(const NormArgs&);
void rotary(const RotaryArgs&);
void activation(const ActivationArgs&);
void write_kv(const WriteKvArgs&);
void clamped_swiglu(const ClampedSwigluArgs&);
void xielu(const XieluArgs&);
void add(const AddArgs&);
void scale(const ScaleArgs&);
void join_heads(const JoinHeadsArgs&);
void route(const RouteArgs&);
void sort_by_expert(const SortByExpertArgs&);
void grouped_linear(const GroupedLinearArgs&);
void combine(const CombineArgs&);
void causal_conv(const CausalConvArgs&);
void selective_scan(const SelectiveScanArgs&);
void gated_norm(const GatedNormArgs&);
void unpacked_linear(const LinearArgs&);
void quantized_embedding(const EmbeddingArgs&);
void unpacked_grouped_linear(const GroupedLinearArgs&);
void likeliest(const LikeliestArgs&);
void sum_rows(const SumRowsArgs&);
bool packs_rows(DType);
void pack_rows(const PackArgs&);

extern const Kernels kernels;

void integer_linear(const LinearArgs&);  // not in the table: see isa.h
}  // namespace QUIRE_ISA
#endif

}  // namespace quire
