// A device "emu" whose memory is the processor's: its operators run the processor's kernels on the same bytes.
//
// It has what an accelerator has and a test can see: tensors that no kernel mixes with the processor's, an autograd
// thread of its own, streams and events, and a log of every copy to the host or the device, of every wait of the host
// for the device, and of every operator that a stream runs, with the processor time that these take.
#include <ATen/Functions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/ForeachUtils.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <unordered_map>

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
constexpr auto EMU = c10::DeviceType::PrivateUse1;
constexpr auto EMU_KEY = c10::DispatchKey::PrivateUse1;
const c10::Device DEVICE(EMU, 0);

// How many devices a host says it has, though all of them are one: EMU_DEVICES, or one for each rank.
c10::DeviceIndex device_count() {
  const char* count = std::getenv("EMU_DEVICES");
  return static_cast<c10::DeviceIndex>(count ? std::atoi(count) : 8);
}

std::mutex log_mutex;
std::vector<std::string> events;

void note(const std::string& event) {
  std::lock_guard<std::mutex> lock(log_mutex);
  events.push_back(event);
}

// Whether the log also tells what `tests/accelerator/races.py` reads: which memory is taken, freed, read and written, on
// which stream, and which event each stream and the host wait for.
std::atomic<bool> notes_memory{false};

void note_memory(const std::string& event) {
  if (notes_memory) {
    note(event);
  }
}

std::string address(const void* memory) {
  return std::to_string(reinterpret_cast<uintptr_t>(memory));
}

thread_local c10::StreamId current_stream = 0;

// The host waits for a stream: the current one, unless another is named.
void note_wait(const std::string& by, c10::StreamId stream = current_stream) {
  note("sync " + by);
  note_memory("host after stream " + std::to_string(stream));
}

std::atomic<int64_t> busy{0};

// Adds up the time of this thread until the end of a block.
struct Busy {
  static int64_t now() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return 1'000'000'000 * time.tv_sec + time.tv_nsec;
  }
  int64_t start = now();
  ~Busy() {
    busy += now() - start;
  }
};

// ---- memory

constexpr size_t ALIGNMENT = 64;

// The bytes of the device that are in use. Results of operators count too, though the processor's allocator made them.
class Usage {
 public:
  // Count a storage over some memory; views of that memory through other storages count once.
  void add(const void* memory, size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& block = blocks_[memory];
    if (block.storages++ == 0) {
      note_memory("take " + address(memory) + " " + std::to_string(nbytes) + " on " + std::to_string(current_stream));
      block.nbytes = nbytes;
      allocated_ += nbytes;
      peak_ = std::max(peak_, allocated_);
    }
  }
  void remove(const void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto block = blocks_.find(memory);
    if (--block->second.storages == 0) {
      note_memory("free " + address(memory));
      allocated_ -= block->second.nbytes;
      blocks_.erase(block);
    }
  }
  int64_t allocated() {
    std::lock_guard<std::mutex> lock(mutex_);
    return allocated_;
  }
  int64_t peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    return peak_;
  }
  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = allocated_;
  }

 private:
  struct Block {
    int64_t nbytes = 0;
    int64_t storages = 0;
  };
  std::mutex mutex_;
  std::unordered_map<const void*, Block> blocks_;
  int64_t allocated_ = 0;
  int64_t peak_ = 0;
};
// Never destroyed, because tensors may outlive the library's variables.
Usage& usage = *new Usage;

void free_emu(void* memory) {
  if (memory != nullptr) {
    usage.remove(memory);
  }
  std::free(memory);
}

struct EmuAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* memory = nbytes ? std::aligned_alloc(ALIGNMENT, (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT) : nullptr;
    if (memory != nullptr) {
      usage.add(memory, nbytes);
    }
    return {memory, memory, &free_emu, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_emu;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }
};
EmuAllocator allocator;
REGISTER_ALLOCATOR(EMU, &allocator)

struct EmuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::globalContext().defaultGenerator(c10::kCPU);
    return generator;
  }
  at::Device getDeviceFromPtr(void*) const override {
    return DEVICE;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::kCPU);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto memory = allocator.allocate(nbytes);
    if (nbytes && storage.nbytes()) {
      note_memory(
          "launch resize_ on " + std::to_string(current_stream) + " reads " + address(storage.data()) + " writes " +
          address(memory.get()));
      memcpy(memory.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

// ---- streams: what is enqueued runs at once, and the log has its order

std::atomic<c10::StreamId> streams{0};
std::atomic<int64_t> recordings{0};

// A recording of an event: what its stream had in its queue.
struct EmuEvent {
  c10::StreamId stream = 0;
  int64_t recording = 0;
};

struct EmuGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return EMU;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return DEVICE;
  }
  c10::Device getDevice() const override {
    return DEVICE;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, 0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, ++streams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto before = getStream(DEVICE);
    current_stream = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    auto* made = *event == nullptr ? new EmuEvent : static_cast<EmuEvent*>(*event);
    *made = {stream.id(), ++recordings};
    *event = made;
    note_memory("event " + std::to_string(made->recording) + " of " + std::to_string(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* source = static_cast<EmuEvent*>(event);
    note("order stream " + std::to_string(stream.id()) + " after " + std::to_string(source->stream));
    note_memory("stream " + std::to_string(stream.id()) + " after event " + std::to_string(source->recording));
  }
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<EmuEvent*>(event);
  }
  void synchronizeEvent(void* event) const override {
    note("sync event");
    note_memory("host after event " + std::to_string(static_cast<EmuEvent*>(event)->recording));
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_wait("stream", stream.id());
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    note("sync device");
    note_memory("host after device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    note("record stream " + std::to_string(stream.id()));
    note_memory("keep " + address(memory.get()) + " for " + std::to_string(stream.id()));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, EmuGuard)

// ---- the same bytes as a tensor of the other device

void release_host(void* context) {
  delete static_cast<c10::Storage*>(context);
}

void release_emu(void* context) {
  auto* kept = static_cast<c10::Storage*>(context);
  if (kept->data() != nullptr) {
    usage.remove(kept->data());
  }
  delete kept;
}

c10::Storage storage_over(const c10::Storage& storage, c10::Device device) {
  auto* kept = new c10::Storage(storage);
  auto* deleter = device == DEVICE ? &release_emu : &release_host;
  if (device == DEVICE && storage.data() != nullptr) {
    usage.add(storage.data(), storage.nbytes());
  }
  c10::DataPtr memory(const_cast<void*>(storage.data()), kept, deleter, device);
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), c10::GetAllocator(device.type()), true);
}

Tensor with_storage(const Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) {
    made._set_conj(true);
  }
  if (like.is_neg()) {
    made._set_neg(true);
  }
  return made;
}

Tensor on_host(const Tensor& tensor) {
  return with_storage(tensor, storage_over(tensor.storage(), c10::kCPU), c10::DispatchKey::CPU);
}

Tensor on_emu(const Tensor& tensor) {
  return with_storage(tensor, storage_over(tensor.storage(), DEVICE), EMU_KEY);
}

bool is_emu(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == EMU;
}

// ---- operators

void check_devices(const c10::OperatorHandle& op, const std::vector<Tensor>& tensors) {
  bool emu = false;
  const Tensor* host = nullptr;
  for (const auto& tensor : tensors) {
    emu = emu || is_emu(tensor);
    // As on other accelerators, a number of the processor goes with any tensor.
    if (tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0) {
      host = &tensor;
    }
  }
  TORCH_CHECK(!(emu && host), op.schema().name(), ": expected all tensors to be on the same device, found emu and cpu");
}

// An operator may have made its out= larger.
void take_resized(const Tensor& tensor, const Tensor& host) {
  if (is_emu(tensor) && host.storage().data() != tensor.storage().data()) {
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage_over(host.storage(), DEVICE));
  }
  if (is_emu(tensor) && host.sizes() != tensor.sizes()) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
}

// The memory that a kernel reads and writes.
class Launch {
 public:
  void reads(const c10::IValue& value) {
    add(value, reads_);
  }
  void writes(const c10::IValue& value) {
    add(value, writes_);
  }
  void log(const std::string& name) const {
    note_memory("launch " + name + " on " + std::to_string(current_stream) + " reads" + reads_ + " writes" + writes_);
  }

 private:
  static void add(const c10::IValue& value, std::string& addresses) {
    if (!notes_memory) {
      return;
    }
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      // Numbers of the host are arguments of the launch.
      if (tensor.defined() && (is_emu(tensor) || tensor.dim() > 0) && tensor.storage().data() != nullptr) {
        addresses += (is_emu(tensor) ? " " : " host:") + address(tensor.storage().data());
      }
    } else if (value.isList()) {
      for (const auto& item : value.toListRef()) {
        add(item, addresses);
      }
    }
  }

  std::string reads_;
  std::string writes_;
};

// Log an operator that has run: its schema tells which arguments it writes, and which results are views.
void log_launch(
    const c10::FunctionSchema& schema, const std::vector<c10::IValue>& given, c10::ArrayRef<c10::IValue> results) {
  Launch launch;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      launch.writes(given[i]);
    } else if (alias == nullptr) {
      launch.reads(given[i]);
    }
  }
  for (size_t i = 0; i < results.size(); ++i) {
    if (schema.returns()[i].alias_info() == nullptr) {
      launch.writes(results[i]);
    }
  }
  launch.log(schema.name());
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Busy timer;
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto begin = stack->size() - count;
  const std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[begin + i];
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
      if (is_emu(value.toTensor())) {
        value = on_host(value.toTensor());
      }
    } else if (value.isTensorList() || value.isOptionalTensorList() || value.isList()) {
      auto list = value.toListRef();
      bool any = false;
      for (const auto& item : list) {
        any = any || (item.isTensor() && is_emu(item.toTensor()));
      }
      for (const auto& item : list) {
        if (item.isTensor()) {
          tensors.push_back(item.toTensor());
        }
      }
      if (!any) {
        continue;
      }
      if (value.isTensorList()) {
        c10::List<Tensor> moved;
        for (const auto& item : list) {
          moved.push_back(is_emu(item.toTensor()) ? on_host(item.toTensor()) : item.toTensor());
        }
        value = std::move(moved);
      } else {
        c10::List<std::optional<Tensor>> moved;
        for (const auto& item : list) {
          std::optional<Tensor> each;
          if (item.isTensor()) {
            each = is_emu(item.toTensor()) ? on_host(item.toTensor()) : item.toTensor();
          }
          moved.push_back(each);
        }
        value = std::move(moved);
      }
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    }
  }
  check_devices(op, tensors);
  note("run " + schema.name() + " on " + std::to_string(current_stream));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto results = schema.returns().size();
  const auto out = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    auto& value = (*stack)[out + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      // In place, or into out=: the argument itself is the result.
      for (size_t k = 0; k < count; ++k) {
        const auto* other = schema.arguments()[k].alias_info();
        if (other != nullptr && *other == *alias) {
          if (given[k].isTensor()) {
            take_resized(given[k].toTensor(), value.toTensor());
          }
          value = given[k];
        }
      }
    } else if (value.isTensor()) {
      if (value.toTensor().defined()) {
        value = on_emu(value.toTensor());
      }
    } else if (value.isTensorList()) {
      c10::List<Tensor> moved;
      for (const Tensor& item : value.toTensorVector()) {
        moved.push_back(on_emu(item));
      }
      value = std::move(moved);
    }
  }
  const auto returned = c10::ArrayRef<c10::IValue>(*stack).slice(out, results);
  if (notes_memory) {
    log_launch(schema, given, returned);
  }
  for (const auto& value : returned) {
    if (value.isBool()) {
      note_wait(schema.name());
    }
  }
}

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>) {
  auto type = c10::scalarTypeToTypeMeta(dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype())));
  auto nbytes = at::detail::computeStorageNbytes(size, stride, type.itemsize());
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, allocator.allocate(nbytes), &allocator, true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(EMU_KEY), type);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return made;
}

Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned,
    std::optional<c10::MemoryFormat> format) {
  auto made = empty_strided(size, c10::contiguous_strides(size), dtype, layout, device, pinned);
  if (format.value_or(c10::MemoryFormat::Contiguous) != c10::MemoryFormat::Contiguous) {
    made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return made;
}

Tensor strided(
    const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return made;
}

// The same view of a tensor that `viewed` is of its bytes on the host.
Tensor view_by(const Tensor& self, const Tensor& viewed) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), viewed.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(viewed.sizes(), viewed.strides(), viewed.storage_offset());
  return made;
}

Tensor view(const Tensor& self, c10::IntArrayRef size) {
  return view_by(self, on_host(self).view(size));
}

Tensor view_dtype(const Tensor& self, c10::ScalarType dtype) {
  return view_by(self, on_host(self).view(dtype));
}

Tensor view_as_real(const Tensor& self) {
  return view_by(self, at::view_as_real(on_host(self)));
}

Tensor view_as_complex(const Tensor& self) {
  return view_by(self, at::view_as_complex(on_host(self)));
}

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return strided(self, size, stride, std::nullopt);
}

Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return view_by(self, on_host(self).unfold(dim, size, step));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto stride = c10::contiguous_strides(size);
  auto nbytes = at::detail::computeStorageNbytes(size, stride, self.dtype().itemsize(), self.storage_offset());
  if (nbytes > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), nbytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, self.storage_offset());
  return self;
}

Tensor& set_(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(source.device() == DEVICE, "set_: expected a storage on emu, found ", source.device());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      size, stride.data() == nullptr && !size.empty() ? c10::IntArrayRef(c10::contiguous_strides(size)) : stride, offset);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  int64_t numel = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_(self, std::move(source), 0, {numel}, {1});
}

Tensor& set_empty(Tensor& self) {
  return set_(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true), 0, {0}, {1});
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  Busy timer;
  const bool to_host = is_emu(source) && !is_emu(self);
  const bool crosses = is_emu(self) != is_emu(source);
  if (crosses) {
    note(std::string(to_host ? "to host " : "to emu ") + std::to_string(source.numel()) + (non_blocking ? " async" : ""));
  } else {
    note("run aten::copy_ on " + std::to_string(current_stream));
  }
  auto target = is_emu(self) ? on_host(self) : self;
  target.copy_(is_emu(source) ? on_host(source) : source);
  Launch launch;
  launch.reads(source);
  launch.writes(self);
  launch.log("aten::copy_");
  // As CUDA does in both directions, whether or not the host's memory is pinned.
  if (crosses && !non_blocking && source.numel()) {
    note_wait("copy_");
  }
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Tensor self = target;
  copy_(self, source, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

c10::Scalar local_scalar_dense(const Tensor& self) {
  Launch launch;
  launch.reads(self);
  launch.log("aten::_local_scalar_dense");
  note_wait("aten::_local_scalar_dense");
  return on_host(self).item();
}

bool equal(const Tensor& self, const Tensor& other) {
  Launch launch;
  launch.reads(self);
  launch.reads(other);
  launch.log("aten::equal");
  note_wait("aten::equal");
  return on_host(self).equal(on_host(other));
}

void record_stream(Tensor& self, c10::Stream stream) {
  note("record stream " + std::to_string(stream.id()));
  note_memory("keep " + address(self.storage().data()) + " for " + std::to_string(stream.id()));
}

// Their results' shapes depend on values.
void run_and_wait(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_host(op, stack);
  note_wait(op.schema().name());
}

// An index of the processor is copied to the device, which the host waits for.
void run_index(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (auto& value : *stack) {
    if (!value.isOptionalTensorList()) {
      continue;
    }
    c10::List<std::optional<Tensor>> moved;
    for (const auto& item : value.toListRef()) {
      std::optional<Tensor> each;
      if (item.isTensor()) {
        each = item.toTensor();
        if (each->defined() && !is_emu(*each)) {
          note("to emu " + std::to_string(each->numel()));
          note_wait("index");
          each = on_emu(each->clone());
        } else if (each->scalar_type() == c10::kBool || each->scalar_type() == c10::kByte) {
          note_wait("index by a mask");
        }
      }
      moved.push_back(each);
    }
    value = std::move(moved);
  }
  run_on_host(op, stack);
}

// An operator on lists: one kernel under the conditions by which CUDA has one, else one for each entry.
void run_list(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const bool is_copy = op.schema().name() == "aten::_foreach_copy_";
  std::vector<Tensors> lists;
  bool is_one_kernel = true;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensorList()) {
      lists.push_back(value.toTensorVector());
    } else if (value.isTensor()) {
      const auto number = value.toTensor();
      is_one_kernel = is_one_kernel && (!is_emu(number) || number.scalar_type() == lists[0][0].scalar_type());
    }
  }
  const std::vector<at::TensorList> views(lists.begin(), lists.end());
  is_one_kernel = is_one_kernel && at::native::_check_tensors_share_device_and_dtype(views, is_copy) &&
      at::native::_check_tensors_share_sizes_and_strides(views);
  for (size_t i = 1; !is_one_kernel && i < lists[0].size(); ++i) {
    note("run " + op.schema().name() + " on " + std::to_string(current_stream));
  }
  run_on_host(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// Autocast casts nothing here, and lets operators through.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", strided);
  m.impl("view", view);
  m.impl("view.dtype", view_dtype);
  m.impl("view_as_real", view_as_real);
  m.impl("view_as_complex", view_as_complex);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_", set_empty);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("equal", equal);
  m.impl("record_stream", record_stream);
  for (const char* name : {"nonzero", "masked_select", "_unique2", "unique_consecutive", "repeat_interleave.Tensor"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_and_wait>());
  }
  for (const char* name : {"index.Tensor", "_index_put_impl_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_index>());
  }
  for (const char* name : {"_foreach_copy_", "_foreach_add_.Scalar", "_foreach_div_.Scalar", "_foreach_div_.Tensor"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_list>());
  }
}

// ---- collectives: those of gloo, on the same bytes

struct Works final : c10d::Work {
  explicit Works(std::vector<c10::intrusive_ptr<c10d::Work>> works) : works_(std::move(works)) {}
  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isCompleted(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& work : works_) {
      work->wait(timeout);
    }
    return true;
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

using Started = c10::intrusive_ptr<c10d::Work>;

// As NCCL's it fuses lists of tensors, and takes none of the processor's.
struct EmuBackend final : c10d::Backend {
  explicit EmuBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "emuccl";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto moved = host(tensors);
    return gloo_->broadcast(moved, options);
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto moved = host(tensors);
    return gloo_->allreduce(moved, options);
  }
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Started> works;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      works.push_back(allreduce(one, options));
    }
    return c10::make_intrusive<Works>(works);
  }
  Started _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto target = host(out), source = host(in);
    return gloo_->_allgather_base(target, source, options);
  }
  Started allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    std::vector<Started> works;
    for (size_t i = 0; i < in.size(); ++i) {
      works.push_back(_allgather_base(out[i], in[i], options));
    }
    return c10::make_intrusive<Works>(works);
  }
  Started _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto target = host(out), source = host(in);
    return gloo_->_reduce_scatter_base(target, source, options);
  }
  Started reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    std::vector<Started> works;
    for (size_t i = 0; i < in.size(); ++i) {
      works.push_back(_reduce_scatter_base(out[i], in[i], options));
    }
    return c10::make_intrusive<Works>(works);
  }
  Started alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions& options) override {
    auto target = host(out), source = host(in);
    return gloo_->alltoall_base(target, source, out_splits, in_splits, options);
  }
  Started barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }
  // gloo has none, but a receive that is waited for in vain ends its connection, and what waits there.
  void abort() override {
    std::vector<Started> receives;
    for (int rank = 0; rank < getSize(); ++rank) {
      Tensors one{at::empty({1})};
      if (rank != getRank()) {
        try {
          receives.push_back(gloo_->recv(one, rank, 1));
        } catch (const std::exception&) {
          // The connection has ended already.
        }
      }
    }
    for (auto& receive : receives) {
      try {
        receive->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {
      }
    }
  }

 private:
  static Tensor host(const Tensor& tensor) {
    TORCH_CHECK(is_emu(tensor), "emuccl: expected a tensor on emu, found one on ", tensor.device());
    return on_host(tensor);
  }
  static Tensors host(const Tensors& tensors) {
    Tensors moved;
    for (const auto& tensor : tensors) {
      moved.push_back(host(tensor));
    }
    return moved;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

std::vector<std::string> take_events() {
  std::lock_guard<std::mutex> lock(log_mutex);
  std::vector<std::string> taken;
  taken.swap(events);
  return taken;
}

const bool registered = [] {
  static EmuHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("take_events", take_events, "Return the log and begin a new one.");
  m.def("note", note, "Write a line to the log.");
  m.def("note_memory", [](bool value) { notes_memory = value; }, "Let the log tell of memory and events, or no longer.");
  m.def("allocated_bytes", [] { return usage.allocated(); }, "The bytes of the device that tensors hold.");
  m.def("peak_bytes", [] { return usage.peak(); }, "The most bytes that tensors held since reset_peak().");
  m.def("reset_peak", [] { usage.reset_peak(); }, "Let the peak begin at the bytes that tensors hold now.");
  m.def("busy_seconds", [] { return 1e-9 * busy; }, "The processor time that operators have taken so far.");
  m.def(
      "backend_over",
      [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<EmuBackend>(std::move(gloo));
      },
      "Make a backend for emu's tensors of one for the processor's.");
}
