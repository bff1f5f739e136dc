// Torch's PrivateUse1 device on top of machine.h: guard, hooks, and operators that run CPU kernels on the same
// memory. What a GPU would block the host for is reported as a synchronization.
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <unordered_set>

#include "machine.h"

namespace streamed {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

Machine& machine() {
  return Machine::get();
}

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device) const override { return {kDevice, 0}; }
  Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  static Stream stream(int64_t number) { return Stream(Stream::UNSAFE, {kDevice, 0}, number); }
  Stream getStream(Device) const override { return stream(machine().current()); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(machine().new_stream()); }
  Stream getNewStream(Device, int) const override { return stream(machine().new_stream()); }
  Stream exchangeStream(Stream to) const override { return stream(machine().exchange(to.id())); }
  bool queryStream(const Stream& of) const override { return machine().query(machine().clock_of(of.id())); }
  void synchronizeStream(const Stream& of) const override { machine().synchronize("stream", of.id()); }

  // An event is the clock of its stream when it was recorded.
  static Clock* clock(void* event) { return static_cast<Clock*>(event); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete clock(event); }
  void record(void** event, const Stream& on, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Clock();
    *clock(*event) = machine().clock_of(on.id());
  }
  void block(void* event, const Stream& waiting) const override {
    if (event) machine().wait(waiting.id(), *clock(event));
  }
  bool queryEvent(void* event) const override { return !event || machine().query(*clock(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) machine().synchronize("event", *clock(event));
  }
  void synchronizeDevice(const DeviceIndex) const override { machine().synchronize_device(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& on) const override {
    machine().record(data.get(), on.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    size_t kept = std::min(impl->nbytes(), size);
    c10::DataPtr to = device_allocator()->allocate(size);
    if (kept) {
      machine().launch(
          machine().current(), "resize", {{impl->mutable_data(), 0, kept}}, {{to.get(), 0, kept}});
      std::memcpy(to.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(to));
    impl->set_nbytes(size);
  }
};

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size,
      stride,
      device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size,
      device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())),
      format);
}

// Copies between host and device wait for the stream, unless the host's side is pinned and the caller says so.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  int64_t stream = machine().current();
  if (is_ours(from) && is_ours(to)) {
    machine().launch(stream, "copy_", {span_of(from)}, {span_of(to)});
    host_view(to).copy_(host_view(from));
  } else if (is_ours(to)) {
    machine().launch(stream, "copy_ from the host", {}, {span_of(to)});
    if (!non_blocking || !is_pinned(from.const_data_ptr())) machine().synchronize("copy from the host", stream);
    host_view(to).copy_(from);
  } else {
    machine().launch(stream, "copy_ to the host", {span_of(from)}, {});
    if (non_blocking && is_pinned(to.const_data_ptr())) {
      machine().arrive_later(stream, to, host_view(from).clone());
    } else {
      machine().synchronize("copy to the host", stream);
      to.copy_(host_view(from));
    }
  }
  return to;
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  machine().launch(machine().current(), "item", {span_of(tensor)}, {});
  machine().synchronize("item", machine().current());
  return at::_local_scalar_dense(host_view(tensor));
}

void record_stream(at::Tensor& tensor, Stream stream) {
  machine().record(tensor.storage().mutable_data(), stream.id());
}

// Operators whose result, or its size, the host must see.
const std::unordered_set<std::string> kSeenByHost = {
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::repeat_interleave",
};

// Everything else: the CPU kernel on the same memory, as work of the current stream.
struct Call {
  std::string name;
  std::vector<std::pair<at::Tensor, at::Tensor>> arguments;  // ours, and the view of it that the kernel gets
  std::vector<Span> reads, writes;
  bool seen_by_host = false;

  bool indexes() const { return name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_"; }

  at::Tensor argument(const at::Tensor& tensor, const c10::AliasInfo* alias) {
    if (!is_ours(tensor)) {
      bool is_number = !tensor.defined() || tensor.dim() == 0;
      TORCH_CHECK(is_number || indexes(), name, ": a tensor of the CPU among those of the device");
      seen_by_host |= !is_number;  // an index is uploaded
      return tensor;
    }
    // A view (an alias that is not written to) does not look at memory.
    if (alias == nullptr) reads.push_back(span_of(tensor));
    if (alias != nullptr && alias->isWrite()) writes.push_back(span_of(tensor));
    bool is_mask = indexes() && !arguments.empty() && tensor.scalar_type() == at::kBool;
    seen_by_host |= is_mask;  // how many elements it selects
    arguments.emplace_back(tensor, host_view(tensor));
    return arguments.back().second;
  }

  // An `out` of another size than it had.
  void take_over_sizes() const {
    for (const auto& [ours, view] : arguments) {
      if (view.sizes() == ours.sizes()) continue;
      if (view.storage().nbytes() > ours.storage().nbytes())
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(ours.storage(), view.storage().nbytes());
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
      machine().launch(machine().current(), name, {}, {span_of(ours)});
      host_view(ours).copy_(view);
    }
  }

  // What the kernel returned, on our device: an argument, a view of one, or new.
  at::Tensor result(const at::Tensor& value) const {
    if (!value.defined()) return value;
    for (const auto& [ours, view] : arguments)
      if (value.is_same(view)) return ours;
    for (const auto& [ours, view] : arguments) {
      if (value.storage().nbytes() == 0 || value.storage().data() != ours.storage().data()) continue;
      auto made = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(ours.storage()), ours.key_set(), value.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(
          value.sizes(), value.strides(), value.storage_offset());
      return made;
    }
    at::Tensor made = empty_strided(
        value.sizes(), value.strides(), value.scalar_type(), std::nullopt, std::nullopt, std::nullopt);
    machine().launch(machine().current(), name, {}, {span_of(made)});
    host_view(made).copy_(value);
    return made;
  }
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call{schema.name()};
  size_t first = stack->size() - schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (value.isTensor()) {
      value = call.argument(value.toTensor(), alias);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector())
        list.push_back(call.argument(tensor, alias));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional(call.argument(*tensor, alias)) : tensor);
      value = list;
    } else if (value.isDevice()) {
      value = Device(c10::DeviceType::CPU);
    }
  }
  machine().launch(machine().current(), schema.name(), call.reads, call.writes);
  if (call.seen_by_host || kSeenByHost.count(schema.name()))
    machine().synchronize(schema.name(), machine().current());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.take_over_sizes();
  first = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = call.result(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(call.result(tensor));
      value = list;
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("record_stream", &record_stream);
  // Torch would make it of other operators on a device that it does not know, with other roundings.
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

[[maybe_unused]] const bool registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kDevice, device_allocator());
  return true;
}();

}  // namespace
}  // namespace streamed
