//! Subjects of the rows: a kernel call by call, and an address space over some back end, with memory, devices and a
//! limit that the rows know.

use std::sync::Arc;

use ioas::{AttachError, Errno, Ioas, KernelError, MapSource, Mapper, Memory};
use iopt::Prot;
use runs::{Iova, Span};

/// Result of an operation: bytes, or the kernel's number.
pub(crate) type Answer = Result<u64, Errno>;

pub(crate) const PAGE: u64 = 4096;
pub(crate) const MIB: u64 = 1 << 20;
/// The limit on locked memory.
pub(crate) const LIMIT: u64 = 16 * MIB;
/// Range that no device translates: messages of interrupts go there. Linux, drivers/iommu/intel/iommu.c and
/// arm/arm-smmu-v3/arm-smmu-v3.c.
pub(crate) const RESERVED: Span<Iova> = match cfg!(target_arch = "aarch64") {
    true => Span::new(0x800_0000, MIB),
    false => Span::new(0xfee0_0000, MIB),
};
/// Upper bound of the addresses that [`Which::Narrow`] translates.
pub(crate) const NARROW: u64 = 1 << 32;
/// Bytes of the memory.
pub(crate) const MEMORY: u64 = 128 * MIB;
/// Offset in it of the page that cannot be pinned.
pub(crate) const BAD: u64 = 64 * MIB;

/// A device: the usual one, one more, or one that translates less than 4 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Usual,
    Second,
    Narrow,
}

/// Surroundings of a kernel's address space.
pub(crate) trait Surroundings<K: Mapper> {
    /// A device was attached: has it reach the memory, if that takes more.
    fn attached(&mut self, _device: &K::Device) -> Result<(), KernelError> {
        Ok(())
    }

    /// Bytes that the kernel counts as locked, more than in the beginning.
    fn locked(&self) -> u64;
    /// Holds `range` by a user that does not let go.
    fn hold(&mut self, range: Span<Iova>);
}

/// A kernel, call by call: an address space with the usual device.
pub(crate) struct Raw<K: Mapper> {
    pub(crate) space: K,
    /// Devices by [`Which`], as many as there are.
    devices: Vec<K::Device>,
    /// The address of the memory.
    pub(crate) memory: u64,
    around: Box<dyn Surroundings<K>>,
}

fn answer<T>(result: Result<T, KernelError>, ok: impl FnOnce(T) -> u64) -> Answer {
    result.map(ok).map_err(|error| match error {
        KernelError::Refused { errno, .. } => Errno(errno),
        // Without a call to the kernel.
        KernelError::NoSource => Errno::EOPNOTSUPP,
        error => panic!("{error}"),
    })
}

#[allow(unsafe_code)]
impl<K: Mapper> Raw<K> {
    /// Attaches the usual device.
    ///
    /// # Safety
    ///
    /// For good: the [`MEMORY`] bytes at `memory` stay as they are and are not accessed otherwise; or they belong to a
    /// model, which does not access them either.
    pub(crate) unsafe fn new(
        space: K,
        devices: Vec<K::Device>,
        memory: u64,
        around: Box<dyn Surroundings<K>>,
    ) -> Self {
        let mut raw = Self {
            space,
            devices,
            memory,
            around,
        };
        raw.attach(Which::Usual).unwrap();
        raw
    }

    pub(crate) fn attach(&mut self, which: Which) -> Answer {
        let device = &self.devices[which as usize];
        let entered = self.space.enter(device, ioas::Entering::default());
        let attached = entered.and_then(|()| self.around.attached(device));
        answer(attached, |()| 0)
    }

    pub(crate) fn map(&mut self, iova: u64, len: u64) -> Answer {
        self.map_at(iova, len, 0, Prot::RW)
    }

    /// Maps memory from `offset` on.
    pub(crate) fn map_at(&mut self, iova: u64, len: u64, offset: u64, prot: Prot) -> Answer {
        let source = MapSource::Address(self.memory.wrapping_add(offset));
        // SAFETY: a part of the memory, of which `new` was promised this; other addresses are such
        // that no kernel maps them.
        let mapped = unsafe { self.space.map(Span::new(iova, len), source, prot) };
        answer(mapped, |()| 0)
    }

    /// Copies what the space maps at `from` to `iova`, there too.
    pub(crate) fn copy(&mut self, from: u64, iova: u64, len: u64, prot: Prot) -> Answer {
        let space = self.space.number();
        let source = MapSource::Copy { space, iova: from };
        // SAFETY: a copy has no address.
        let mapped = unsafe { self.space.map(Span::new(iova, len), source, prot) };
        answer(mapped, |()| 0)
    }

    pub(crate) fn unmap(&mut self, iova: u64, len: u64) -> Answer {
        answer(self.space.unmap(Span::new(iova, len)), |bytes| bytes)
    }

    pub(crate) fn dirty(&mut self, iova: u64, len: u64) -> Answer {
        let mut bitmap = [0; 4];
        let read = self.space.dirty(Span::new(iova, len), PAGE, &mut bitmap);
        answer(read, |()| {
            bitmap.iter().map(|word| u64::from(word.count_ones())).sum()
        })
    }

    pub(crate) fn track(&mut self) -> Answer {
        answer(self.space.set_tracking(true), |()| 0)
    }

    pub(crate) fn give_up(&mut self) -> Answer {
        answer(self.space.give_up_addresses(), |()| 0)
    }

    pub(crate) fn take_over(&mut self, iova: u64, len: u64) -> Answer {
        let there = (Span::new(iova, len), MapSource::Address(self.memory));
        // SAFETY: as for `map_at`.
        answer(unsafe { self.space.take_over(&[], &[there]) }, |()| 0)
    }

    pub(crate) fn allow(&mut self, range: Span<Iova>) -> Answer {
        answer(self.space.allow(&[range]), |()| 0)
    }

    pub(crate) fn locked(&self) -> u64 {
        self.around.locked()
    }

    pub(crate) fn hold(&mut self, range: Span<Iova>) {
        self.around.hold(range);
    }
}

/// An address space over some back end.
pub(crate) trait Subject {
    fn space(&self) -> &Ioas;
    /// [`MEMORY`] bytes, of which the page at [`BAD`] cannot be pinned.
    fn memory(&self) -> Arc<Memory>;
    fn attach(&mut self, which: Which) -> Result<(), AttachError>;
    fn detach(&mut self);
    /// Holds `range` by a user that does not let go.
    fn hold(&mut self, range: Span<Iova>);
    /// Bytes that are charged.
    fn charged(&self) -> u64;
}
