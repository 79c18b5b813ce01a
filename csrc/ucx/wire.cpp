#include "ucx/wire.hpp"

#include <utility>

namespace kvxfer::ucx {

namespace {

struct PlanHeader {
  std::uint32_t num_planes;
  std::uint32_t num_segments;
  std::uint32_t num_boxes;
  std::uint32_t num_scales;
  std::uint32_t conversion;
  std::uint32_t reserved;
};

// They travel as they lie in memory; a member more or less must not go unseen.
static_assert(sizeof(SidePlan::Place) == 8 && sizeof(SidePlan::Axis) == 16);
static_assert(sizeof(SidePlan::Box) == 80);

template <class T>
void append(std::vector<std::byte>& out, const T* values, std::size_t count) {
  if (count == 0) return;
  const std::size_t end = out.size();
  out.resize(end + count * sizeof(T));
  std::memcpy(out.data() + end, values, count * sizeof(T));
}

template <class T>
void take(std::span<const std::byte>& data, std::vector<T>& out, std::uint32_t count) {
  out.resize(count);
  if (count != 0) std::memcpy(out.data(), data.data(), count * sizeof(T));
  data = data.subspan(count * sizeof(T));
}

Error malformed(const std::string& what) {
  return {ErrorKind::kTransferFailed, "the peer sent a plan " + what};
}

}  // namespace

Error read_fail(const Fail& fail, std::string text) {
  const bool known = fail.kind < static_cast<std::uint32_t>(ErrorKind::kCount);
  return {known ? static_cast<ErrorKind>(fail.kind) : ErrorKind::kTransferFailed, std::move(text)};
}

std::vector<std::byte> encode(const SidePlan& plan) {
  const PlanHeader header{static_cast<std::uint32_t>(plan.planes.size()),
                          static_cast<std::uint32_t>(plan.segments.size()),
                          static_cast<std::uint32_t>(plan.boxes.size()),
                          static_cast<std::uint32_t>(plan.inverse_scales.size()),
                          static_cast<std::uint32_t>(plan.conversion),
                          0};
  std::vector<std::byte> out;
  append(out, &header, 1);
  append(out, plan.planes.data(), plan.planes.size());
  append(out, plan.segments.data(), plan.segments.size());
  append(out, plan.boxes.data(), plan.boxes.size());
  append(out, plan.inverse_scales.data(), plan.inverse_scales.size());
  if (out.size() > kMaxPlanBytes) {
    throw Error(ErrorKind::kInvalidUsage, "a plan of " + std::to_string(out.size()) +
                                              " bytes of tables; post at most " +
                                              std::to_string(kMaxPlanBytes) + " at once");
  }
  return out;
}

SidePlan decode(std::span<const std::byte> data) {
  PlanHeader header;
  if (data.size() < sizeof(header)) throw malformed("that ends in its header");
  std::memcpy(&header, data.data(), sizeof(header));
  data = data.subspan(sizeof(header));
  const std::uint64_t wanted = std::uint64_t{header.num_planes} * sizeof(std::uint64_t) +
                               std::uint64_t{header.num_segments} * sizeof(SidePlan::Place) +
                               std::uint64_t{header.num_boxes} * sizeof(SidePlan::Box) +
                               std::uint64_t{header.num_scales} * sizeof(float);
  if (wanted != data.size()) {
    throw malformed("of " + std::to_string(data.size()) + " bytes that says it has " +
                    std::to_string(wanted));
  }
  if (header.conversion > static_cast<std::uint32_t>(Conversion::kF16ToE4m3)) {
    throw malformed("with conversion " + std::to_string(header.conversion));
  }
  SidePlan plan;
  take(data, plan.planes, header.num_planes);
  take(data, plan.segments, header.num_segments);
  take(data, plan.boxes, header.num_boxes);
  take(data, plan.inverse_scales, header.num_scales);
  plan.conversion = static_cast<Conversion>(header.conversion);
  return plan;
}

}  // namespace kvxfer::ucx
