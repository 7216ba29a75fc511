//! Why a machine did not do what it was asked.

use std::time::Duration;

use crate::topo::{GpuIdx, NicId, NicIdx};

/// A hardware operation failed. One variant per operation, with what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HwError {
    /// Physical memory could not be had.
    #[error(
        "cannot create {bytes} bytes of memory on {gpu}: {source}; lower FUSELINK_RELAY_BYTES or the buffers"
    )]
    CreateChunk {
        /// Where.
        gpu: GpuIdx,
        /// How much.
        bytes: u64,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Another process's memory could not be taken in.
    #[error("cannot import {bytes} bytes of {gpu}'s memory: {source}")]
    ImportChunk {
        /// The owner's GPU.
        gpu: GpuIdx,
        /// How much was promised.
        bytes: u64,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Memory could not be handed out.
    #[error("cannot export memory of {gpu}: {source}")]
    Export {
        /// Whose memory.
        gpu: GpuIdx,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Addresses could not be reserved.
    #[error("cannot reserve {bytes} bytes of addresses: {source}")]
    Reserve {
        /// How many.
        bytes: u64,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A map, unmap or access call broke a rule of the device.
    #[error("cannot {operation} window bytes {offset}..{end}: {rule}")]
    WindowRule {
        /// What was tried.
        operation: &'static str,
        /// First byte.
        offset: u64,
        /// One past the last byte.
        end: u64,
        /// The rule.
        rule: &'static str,
    },
    /// The system refused a map, unmap or access call.
    #[error("cannot {operation} window bytes {offset}..{end}: {source}")]
    WindowCall {
        /// What was tried.
        operation: &'static str,
        /// First byte.
        offset: u64,
        /// One past the last byte.
        end: u64,
        /// The system's reason.
        source: std::io::Error,
    },
    /// An access to device memory from the host lies outside of any mapping.
    #[error("device address {dev_ptr:#x}..+{bytes} is not mapped on {gpu}")]
    NotMapped {
        /// The GPU asked.
        gpu: GpuIdx,
        /// First address.
        dev_ptr: u64,
        /// Length.
        bytes: u64,
    },
    /// A kernel could not be started.
    #[error("cannot launch {kernel} on {gpu}: {reason}")]
    Launch {
        /// The GPU.
        gpu: GpuIdx,
        /// The kernel.
        kernel: &'static str,
        /// Why.
        reason: String,
    },
    /// What was to hold kernels of the user's does not.
    #[error("cannot load kernels on {gpu}: the image {reason}")]
    Image {
        /// The GPU.
        gpu: GpuIdx,
        /// What is wrong with it.
        reason: String,
    },
    /// A kernel of the user's cannot be launched here.
    #[error("{gpu} cannot be given the kernel {kernel}: {reason}")]
    NoKernel {
        /// The GPU.
        gpu: GpuIdx,
        /// Its name.
        kernel: &'static str,
        /// Why.
        reason: String,
    },
    /// What may wait for kernels would wait for ever, since they wait for the host.
    #[error("cannot {operation} on {gpu} while kernels run there; synchronize first")]
    KernelsRun {
        /// The GPU.
        gpu: GpuIdx,
        /// What was tried.
        operation: &'static str,
    },
    /// The stream of kernels is being captured: what is asked for would not be part of the graph, or spoil it.
    #[error(
        "cannot {operation} on {gpu} while its stream is captured; prepare launches before, and capture launch_prepared"
    )]
    Capturing {
        /// The GPU.
        gpu: GpuIdx,
        /// What was tried.
        operation: &'static str,
    },
    /// Kernels did not finish in time.
    #[error("kernels on {gpu} did not finish within {waited:?}")]
    KernelTimeout {
        /// The GPU.
        gpu: GpuIdx,
        /// How long was waited.
        waited: Duration,
    },
    /// A NIC may only read and write memory beside it.
    #[error("{nic} cannot register memory of {gpu}: it is not beside it (that is {beside})")]
    NotBeside {
        /// The NIC.
        nic: NicIdx,
        /// Whose memory it was.
        gpu: GpuIdx,
        /// The GPU that is beside the NIC.
        beside: GpuIdx,
    },
    /// Memory could not be registered.
    #[error("cannot register {bytes} bytes with {nic}: {source}")]
    Register {
        /// The NIC.
        nic: NicIdx,
        /// How much.
        bytes: u64,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Memory could not be taken from a NIC.
    #[error("{nic} has no memory under the key {key}")]
    Deregister {
        /// The NIC.
        nic: NicIdx,
        /// The key.
        key: u32,
    },
    /// A path could not be opened.
    #[error("cannot open a path from {nic} to {peer}: {reason}")]
    OpenPath {
        /// This side.
        nic: NicIdx,
        /// The other side.
        peer: NicId,
        /// Why.
        reason: String,
    },
    /// Work names a path, key or span that does not exist.
    #[error("{nic} was posted work with a bad {field}: {value}")]
    BadWork {
        /// The NIC.
        nic: NicIdx,
        /// Which field.
        field: &'static str,
        /// What it said.
        value: u64,
    },
    /// This build lacks a backend.
    #[error("this build has no backend for {backend}; build it with --features {feature}")]
    NotBuilt {
        /// What for.
        backend: &'static str,
        /// Cargo's feature that has it.
        feature: &'static str,
    },
    /// There is no usable GPU driver.
    #[error(
        "cannot use the GPUs of this machine: {reason}; install the NVIDIA driver, or use FUSELINK_GPU=emu"
    )]
    NoDriver {
        /// What the loader or the driver says.
        reason: String,
    },
    /// The driver lacks calls that the library makes, or cannot load its kernels.
    #[error("the GPU driver is for CUDA {has}, and this build needs {needs}; update the NVIDIA driver")]
    DriverTooOld {
        /// What is installed, as in `12.4`.
        has: String,
        /// What is needed, likewise.
        needs: String,
    },
    /// The GPU asked for is not there.
    #[error(
        "there is no CUDA device {ordinal} ({count} are visible); see nvidia-smi and CUDA_VISIBLE_DEVICES"
    )]
    NoGpu {
        /// Its number among the visible ones.
        ordinal: u32,
        /// How many are visible.
        count: u32,
    },
    /// The GPU cannot do what the library needs.
    #[error("CUDA device {ordinal} has no {what}; it needs a data-centre GPU (A100 or newer) on Linux")]
    GpuLacks {
        /// Its number among the visible ones.
        ordinal: u32,
        /// What it lacks.
        what: &'static str,
    },
    /// A GPU cannot reach the memory of another one of its server.
    #[error(
        "{gpu} cannot reach the memory of CUDA device {peer}: no NVLink or PCIe peer access between them; see nvidia-smi topo -p2p n"
    )]
    NoPeerAccess {
        /// Which one.
        gpu: GpuIdx,
        /// Whose memory, by its number among the visible devices.
        peer: u32,
    },
    /// A call of the GPU's driver failed.
    #[error("cannot {operation} on {gpu}: {source}")]
    Driver {
        /// The GPU.
        gpu: GpuIdx,
        /// What was tried.
        operation: &'static str,
        /// The driver's reason.
        source: std::io::Error,
    },
    /// A copy between host and GPU did not finish in time.
    #[error("{bytes} bytes were not copied to or from {gpu} within {waited:?}")]
    CopyTimeout {
        /// The GPU.
        gpu: GpuIdx,
        /// How many.
        bytes: u64,
        /// How long was waited.
        waited: Duration,
    },
    /// A system call under a device failed.
    #[error("cannot {operation}: {source}")]
    Os {
        /// What was tried.
        operation: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl HwError {
    /// Whether a GPU has no memory left: it may have when some is given back.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::CreateChunk { source, .. } if source.kind() == std::io::ErrorKind::OutOfMemory)
    }
}
