//! The registers of a unit, as its driver reaches them.
//!
//! A driver owns two seams. Registers are this one. Memory that the unit reads (its structures and
//! queues) is [`iopt::TableMemory`], the seam of page tables: zeroed pages, aligned to their size,
//! with an address that the unit understands, and [`written`](iopt::TableMemory::written) for units
//! that read past the processor's caches ([`iopt::observe::NonCoherent`]). So the two can share one
//! arena.
//!
//! Whatever a driver waits for, it looks, calls [`wait`](Registers::wait), and looks again. How long
//! that goes on is decided there, where there is a clock; a driver never waits without that bound. What the driver
//! knows is behind one lock, and the registers say of which kind: [`Registers::Lock`].

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
/// outside reads as all ones, and a write to it does nothing.
pub trait Registers {
    /// What keeps two threads out of the unit's structures and queues: [`SpinLock`] where no interrupt handler
    /// maps or unmaps, and in a kernel where one does, a lock that disables interrupts. It is held while a
    /// driver [waits](Self::wait) for the unit, so it must not sleep where the caller may not.
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
