//! Contract of the rig and the guest's program: machines, tests, the lines between them, and contents of files.

/// A machine that is booted.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// As the command line calls it.
    pub name: &'static str,
    /// QEMU's arguments for an IOMMU.
    pub unit: &'static [&'static str],
    /// Words of the kernel's command line.
    pub kernel: &'static str,
    /// Devices are behind an IOMMU that the guest's kernel uses.
    pub iommu: bool,
    /// The disk interrupts by a line, and is unplugged: QEMU (11.1.3) ends by an assertion when a device with MSI-X is. On
    /// the others the engine is.
    pub line: bool,
}

/// All of them.
pub const MACHINES: [Machine; 5] = [
    Machine {
        name: "plain",
        unit: &[],
        kernel: "",
        iommu: false,
        line: false,
    },
    Machine {
        name: "line",
        unit: &[],
        kernel: "",
        iommu: false,
        line: true,
    },
    // Without the caching mode QEMU sees no map; with it Linux flushes strictly, whatever it is asked for.
    Machine {
        name: "intel",
        unit: &["-device", "intel-iommu,caching-mode=on,aw-bits=48"],
        kernel: "intel_iommu=on",
        iommu: true,
        line: false,
    },
    Machine {
        name: "virtio-lazy",
        unit: &["-device", "virtio-iommu-pci,addr=2"],
        kernel: "iommu.strict=0",
        iommu: true,
        line: false,
    },
    Machine {
        name: "virtio-strict",
        unit: &["-device", "virtio-iommu-pci,addr=2"],
        kernel: "iommu.strict=1",
        iommu: true,
        line: false,
    },
];

/// That which is last where the rig is asked for it.
pub const FIO: &str = "fio_verifies_what_it_writes";

/// The tests of each machine, in order.
pub const TESTS: [&str; 5] = [
    "the_disk_has_all_its_queues",
    "files_are_there_after_a_remount",
    "threads_verify_what_they_write",
    "a_device_that_is_unplugged_comes_back",
    "dma_outside_of_what_is_mapped_is_a_fault",
];

/// Queues of the disk.
pub const QUEUES: u16 = 2;
/// Files that are written first, and stay.
pub const FILES: u64 = 4;
/// Bytes of each.
pub const FILE_BYTES: usize = 1 << 20;
/// Direct reads and writes of each thread.
pub const OPERATIONS: u64 = 256;
/// Threads.
pub const THREADS: u64 = 2;
/// Where the engine finds no memory of a machine without an IOMMU.
pub const OUTSIDE: u64 = 0x70_0000_0000;
/// Where it does.
pub const INSIDE: u64 = 0x10_0000;

/// Fills `bytes` with what belongs to `seed`.
pub fn fill(seed: u64, bytes: &mut [u8]) {
    // Marsaglia's xorshift, 2003.
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for word in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let from = state.to_le_bytes();
        word.iter_mut().zip(from).for_each(|(to, from)| *to = from);
    }
}
