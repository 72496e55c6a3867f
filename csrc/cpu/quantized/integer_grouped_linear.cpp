// Products of experts' weights that are whole numbers, with x in int8: of a row by its own expert's, which have the bits
// of integer_linear on that expert's weights and that row alone. Other weights of the call are passed by.
#include "cpu/common/kernels.h"
#include "cpu/common/ways.h"
#include "cpu/experts/grouped_run.h"
#include "cpu/quantized/integers.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// Each call's tokens, as int8, have memory of their own.
template <class T, class Products>
void run_integers(const Calls<T>& calls, int64_t chosen) {
  const auto bytes = [](const LinearArgs& call) {
    const Apart counted(nullptr);
    const Products products(call);
    return counted.bytes();
  };
  run_calls<T, Products, char>(calls.some, chosen, calls.calls, calls.factors, bytes,
                               [](const LinearArgs& call, const Factors<T>&, char* memory) {
                                 const Apart apart(memory);
                                 return Products(call);
                               });
}

// Experts with a few rows together, and those with many.
template <class T, bool kWholeRows>
void grouped_integers_as(const GroupedLinearArgs& args) {
  using Own = Integers<T, T, kWholeRows>;
  constexpr Way kWay = kWholeRows ? Way::rows : Way::groups;
  Calls<T> calls(args, [&](int64_t expert, int64_t weight) {
    return way_of(args.formats[expert * args.count + weight].kind, args.dtype) == kWay;
  });
  if (calls.count == 0) return;
  if (args.num_segments > 0) calls.widen();
  const auto many = [](const LinearArgs& call) { return Own::many(call); };
  run_integers<T, typename Own::Products>(calls, calls.choose([&](const LinearArgs& call) { return !many(call); }));
  if constexpr (!__is_same(typename Own::Products, typename Own::OfMany))
    run_integers<T, typename Own::OfMany>(calls, calls.choose(many));
}

template <class T>
void grouped_integers(const GroupedLinearArgs& args) {
  grouped_integers_as<T, false>(args);
  grouped_integers_as<T, true>(args);
}

}  // namespace

void integer_grouped_linear(const GroupedLinearArgs& args) {
  switch (args.dtype) {
    case DType::float32: return grouped_integers<float>(args);
    case DType::bfloat16: return grouped_integers<bf16>(args);
    case DType::float16: return grouped_integers<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
