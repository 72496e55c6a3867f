// Which processor this is, where instruction sets do not tell: for what was measured of some, never for what is computed.
#pragma once

namespace quire {

// AMD's family 26 (Zen 5), and those that came after it; its families 21 to 25 (Zen 4 and before). Found out in isa.cpp,
// which every processor can run.
#if defined(__x86_64__)
extern const bool kAmdSinceZen5, kAmdBeforeZen5;
#else
constexpr bool kAmdSinceZen5 = false, kAmdBeforeZen5 = false;
#endif

}  // namespace quire
