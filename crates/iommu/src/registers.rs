//! The registers of a unit, as its driver reaches them.
//!
//! A driver owns two seams. Registers are this one. Memory that the unit reads (its structures and
//! queues) is [`iopt::TableMemory`], the seam of page tables: zeroed pages, aligned to their size,
//! with an address that the unit understands, and [`written`](iopt::TableMemory::written) for units
//! that read past the processor's caches ([`iopt::observe::NonCoherent`]). So the two can share one
//! arena.
//!
//! A driver that waits polls: it looks, calls [`wait`](Registers::wait), and looks again. `wait` bounds that,
//! because it has a clock; a driver never waits without that bound. The driver's state is behind one lock, of the kind
//! that the registers name: [`Registers::Lock`].

use crate::error::UnitError;

/// A lock that spins, and leaves interrupts as they are.
pub type SpinLock = spin::Mutex<()>;

/// The registers of one unit, by byte offset from the first.
///
/// An access is one access of that width, in program order with all others. A write comes after
/// everything that this thread has stored to memory before, as the unit sees it; what this thread
/// reads from memory after a read of a register is at least as new as the register's value. On x86
/// volatile accesses to uncached memory are enough; Arm and RISC-V need a barrier.
///
/// Offsets are multiples of the width, and partly come from the unit's own registers: one that lies
/// outside reads as all ones, and a write to it does nothing. VT-d has 4 KiB of registers, or the size in the
/// unit's DRHD structure, AMD-Vi 16 KiB, SMMUv3 128 KiB, RISC-V 4 KiB, SMMUv1/v2 the size that firmware names.
///
/// # Registers at an address
///
/// Volatile accesses, as a kernel has them. Plain memory stands for a unit below, an SMMU of version 2 (IHI 0062, issue
/// B) with the three words that its driver probes: it stores what is written and is never busy.
///
/// ```
/// use core::ptr::NonNull;
/// use core::sync::atomic::{AtomicU32, Ordering, fence};
///
/// use iommu::{Registers, Smmu, SpinLock, Unit, smmu};
///
/// struct Mmio {
///     base: NonNull<u8>,
///     bytes: usize,
/// }
///
/// // SAFETY: registers may be reached from any processor; each access is one.
/// unsafe impl Send for Mmio {}
/// // SAFETY: as above.
/// unsafe impl Sync for Mmio {}
///
/// impl Mmio {
///     /// # Safety
///     ///
///     /// `bytes` bytes from `base` on, a multiple of 8, are the unit's registers, mapped as device memory as
///     /// long as this lives, and no other driver drives the unit.
///     unsafe fn new(base: NonNull<u8>, bytes: usize) -> Self {
///         Self { base, bytes }
///     }
///
///     /// The register of 32 or 64 bits at an offset, which may come from the unit: not one beyond the last.
///     fn at<T>(&self, offset: usize) -> Option<NonNull<T>> {
///         let inside = offset % size_of::<T>() == 0 && offset < self.bytes;
///         // SAFETY: `offset` is a multiple of `T`'s size below `bytes`, so all of `T` lies in the mapping.
///         inside.then(|| unsafe { self.base.add(offset) }.cast())
///     }
///
///     fn read<T>(&self, offset: usize) -> Option<T> {
///         // SAFETY: a register, as `new` was promised, and aligned.
///         let value = self.at(offset).map(|at| unsafe { at.read_volatile() });
///         // What is read from memory now is as new as this. On Arm: `dsb ld`.
///         fence(Ordering::SeqCst);
///         value
///     }
///
///     fn write<T>(&self, offset: usize, value: T) {
///         // What was stored to memory comes before. On Arm: `dsb st`.
///         fence(Ordering::SeqCst);
///         if let Some(at) = self.at(offset) {
///             // SAFETY: a register, as `new` was promised, and aligned.
///             unsafe { at.write_volatile(value) }
///         }
///     }
/// }
///
/// impl Registers for Mmio {
///     type Lock = SpinLock;
///
///     fn read32(&self, offset: usize) -> u32 {
///         self.read(offset).unwrap_or(u32::MAX)
///     }
///     fn write32(&self, offset: usize, value: u32) {
///         self.write(offset, value);
///     }
///     fn read64(&self, offset: usize) -> u64 {
///         self.read(offset).unwrap_or(u64::MAX)
///     }
///     fn write64(&self, offset: usize, value: u64) {
///         self.write(offset, value);
///     }
///     /// A kernel looks at its clock here, and gives up after a second.
///     fn wait(&self, round: u32) -> bool {
///         core::hint::spin_loop();
///         round < 1_000_000
///     }
/// }
///
/// // IDR0 to IDR2 (section 10.6.1): both stages, coherent walks, 16 streams with ids of 15 bits; 16 pages of 4 KiB with
/// // global registers and as many with 4 context banks; 48 bits of addresses, tables of 4 KiB.
/// let idrs = [7 << 28 | 1 << 27 | 1 << 14 | 15 << 9 | 16, 3 << 28 | 4, 1 << 12 | 5 << 8 | 5 << 4 | 5];
/// let block: Vec<AtomicU32> = (0..32 * 1024).map(|_| AtomicU32::new(0)).collect();
/// for (place, idr) in block[8..].iter().zip(idrs) {
///     place.store(idr, Ordering::Relaxed);
/// }
/// // SAFETY: so many bytes, which outlive the driver, may be written by any thread, and only this driver does.
/// let registers = unsafe { Mmio::new(NonNull::from(&*block).cast(), size_of_val(&*block)) };
/// let unit = Smmu::new(registers, smmu::Config::default())?;
/// assert_eq!((unit.capabilities().input_bits, unit.capabilities().output_bits), (48, 48));
/// unit.enable()?;
/// // CR0.CLIENTPD is clear: streams are translated.
/// assert_eq!(unit.registers().read32(0) & 1, 0);
/// unit.tear_down()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub trait Registers {
    /// Lock of the unit's structures and queues: [`SpinLock`] where no interrupt handler maps, unmaps or drains
    /// faults, and in a kernel where one does, a lock that disables interrupts. It is held while a driver
    /// [waits](Self::wait) for the unit, so it must not sleep where the caller may not.
    type Lock: lock_api::RawMutex + Send + Sync;

    /// Reads 32 bits.
    fn read32(&self, offset: usize) -> u32;
    /// Writes 32 bits.
    fn write32(&self, offset: usize, value: u32);
    /// Reads 64 bits.
    fn read64(&self, offset: usize) -> u64;
    /// Writes 64 bits.
    fn write64(&self, offset: usize, value: u64);

    /// Called when the unit has not answered yet, with the number of times so far, from 0 on. False
    /// ends the wait: the driver looks once more and gives up with a named error.
    ///
    /// A good implementation spins in the first rounds, then looks at a clock, and returns false
    /// after a time that the unit's manual allows (a second is usual).
    fn wait(&self, round: u32) -> bool;
}

macro_rules! forward {
    ($pointer:ty) => {
        impl<R: Registers + ?Sized> Registers for $pointer {
            type Lock = R::Lock;

            fn read32(&self, offset: usize) -> u32 {
                (**self).read32(offset)
            }
            fn write32(&self, offset: usize, value: u32) {
                (**self).write32(offset, value);
            }
            fn read64(&self, offset: usize) -> u64 {
                (**self).read64(offset)
            }
            fn write64(&self, offset: usize, value: u64) {
                (**self).write64(offset, value);
            }
            fn wait(&self, round: u32) -> bool {
                (**self).wait(round)
            }
        }
    };
}

forward!(&R);
#[cfg(feature = "std")]
forward!(std::sync::Arc<R>);

/// Waits until `done`; `awaited` names that in the error.
pub(crate) fn wait_until<R: Registers + ?Sized>(
    registers: &R,
    awaited: &'static str,
    mut done: impl FnMut() -> Result<bool, UnitError>,
) -> Result<(), UnitError> {
    let mut round = 0;
    loop {
        if done()? {
            return Ok(());
        }
        let rounds = round;
        if !registers.wait(round) || round == u32::MAX {
            // The time may have passed elsewhere, for instance while this thread was not running.
            return match done()? {
                true => Ok(()),
                false => Err(UnitError::TimedOut { awaited, rounds }),
            };
        }
        round += 1;
    }
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::*;

    /// A driver that is not let run: one call, and the time is over.
    struct Interrupted(Cell<bool>);

    impl Registers for Interrupted {
        type Lock = crate::SpinLock;

        fn read32(&self, _offset: usize) -> u32 {
            0
        }
        fn write32(&self, _offset: usize, _value: u32) {}
        fn read64(&self, _offset: usize) -> u64 {
            0
        }
        fn write64(&self, _offset: usize, _value: u64) {}
        fn wait(&self, _round: u32) -> bool {
            self.0.set(true);
            false
        }
    }

    /// The last access: its width, offset and value.
    #[derive(Default)]
    struct Last(spin::Mutex<(u32, usize, u64)>);

    impl Registers for Last {
        type Lock = crate::SpinLock;

        fn read32(&self, offset: usize) -> u32 {
            *self.0.lock() = (32, offset, 0);
            0x8765_4321
        }
        fn write32(&self, offset: usize, value: u32) {
            *self.0.lock() = (32, offset, value.into());
        }
        fn read64(&self, offset: usize) -> u64 {
            *self.0.lock() = (64, offset, 0);
            0xfedc_ba98_7654_3210
        }
        fn write64(&self, offset: usize, value: u64) {
            *self.0.lock() = (64, offset, value);
        }
        fn wait(&self, round: u32) -> bool {
            *self.0.lock() = (0, 0, round.into());
            round < 5
        }
    }

    #[test]
    fn behind_a_pointer_are_the_same_registers() {
        fn through<R: Registers>(registers: R, last: &Last) {
            assert_eq!(registers.read32(4), 0x8765_4321);
            assert_eq!(*last.0.lock(), (32, 4, 0));
            registers.write32(8, 0x9abc_def0);
            assert_eq!(*last.0.lock(), (32, 8, 0x9abc_def0));
            assert_eq!(registers.read64(16), 0xfedc_ba98_7654_3210);
            assert_eq!(*last.0.lock(), (64, 16, 0));
            registers.write64(24, 0x1234_5678_9abc_def0);
            assert_eq!(*last.0.lock(), (64, 24, 0x1234_5678_9abc_def0));
            assert!(registers.wait(4) && !registers.wait(5));
            assert_eq!(*last.0.lock(), (0, 0, 5));
        }
        let last = Last::default();
        through(&last, &last);
        #[cfg(feature = "std")]
        {
            let last = std::sync::Arc::new(last);
            through(last.clone(), &last);
        }
    }

    #[test]
    fn a_unit_that_has_answered_while_the_driver_slept_is_in_time() {
        let registers = Interrupted(Cell::new(false));
        let slept = || Ok(registers.0.get());
        assert_eq!(wait_until(&registers, "an answer", slept), Ok(()));
        assert_eq!(
            wait_until(&registers, "an answer", || Ok(false)),
            Err(UnitError::TimedOut {
                awaited: "an answer",
                rounds: 0
            })
        );
    }
}
