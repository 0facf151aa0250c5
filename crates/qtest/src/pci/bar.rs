//! Base addresses: what a function asks for, and what it gets.
//!
//! # Protocol
//!
//! A function says how much it asks for by the bits of a base address register that cannot be set
//! (PCI, section 6.2.5.1 "Address Maps"). While all ones are written there it would answer at the
//! wrong addresses, so it is first told to answer at none; what was there is put back afterwards.

use super::{Address, BAR0, COMMAND, COMMAND_IO, COMMAND_MEMORY, Config, Error};

/// Bits of a base address register: ports, not memory.
const IO: u32 = 1 << 0;
/// Memory: in bits 2:1, where it may lie; with the next register, anywhere.
const TYPE: u32 = 3 << 1;
const TYPE_64: u32 = 2 << 1;
/// Memory: reading has no side effects.
const PREFETCHABLE: u32 = 1 << 3;

/// Kind of a base address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// Ports.
    Io,
    /// Memory.
    Memory {
        /// Anywhere in 64 bits, not in 32.
        wide: bool,
        /// Reading has no side effects.
        prefetchable: bool,
    },
}

/// A base address that a function has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// The number of the register, the first of two for 64 bits.
    pub index: u8,
    /// For what.
    pub kind: BarKind,
    /// The address.
    pub address: u64,
    /// Bytes, a power of two.
    pub size: u64,
}

/// A stretch of addresses to be given out, from its beginning.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    next: u64,
    end: u64,
}

impl Window {
    /// `len` bytes from `start` on, at most to the end of the address space.
    pub const fn new(start: u64, len: u64) -> Self {
        let end = start.saturating_add(len);
        Self { next: start, end }
    }

    /// `size` bytes, a power of two, at a multiple of that, all of them below `end`.
    fn take(&mut self, size: u64, end: u64) -> Option<u64> {
        let address = self.next.checked_next_multiple_of(size)?;
        let next = address.checked_add(size)?;
        if next > self.end.min(end) {
            return None;
        }
        self.next = next;
        Some(address)
    }
}

impl Config<'_> {
    /// The base addresses of a function. Meanwhile it answers nowhere.
    ///
    /// # Errors
    ///
    /// [`Error::Absent`], and those of the machine; then the function may be left answering nowhere.
    pub fn bars(&self, address: Address) -> Result<Vec<Bar>, Error> {
        let Some(function) = self.function(address)? else {
            return Err(Error::Absent(address));
        };
        let count = match function.header {
            0 => 6,
            // A bridge (PCI-to-PCI Bridge Architecture Specification 1.2, section 3.2).
            1 => 2,
            _ => 0,
        };
        let command = self.read16(address, COMMAND)?;
        self.command(address, 0, COMMAND_IO | COMMAND_MEMORY)?;
        let mut bars = Vec::new();
        let mut index = 0;
        while index < count {
            let (low, low_mask) = self.probe(address, index)?;
            let wide = low & (IO | TYPE) == TYPE_64 && index + 1 < count;
            let (high, high_mask) = if wide {
                self.probe(address, index + 1)?
            } else {
                (0, 0)
            };
            let mask = u64::from(high_mask) << 32 | u64::from(low_mask);
            let value = u64::from(high) << 32 | u64::from(low);
            bars.extend(decode(index, wide, value, mask));
            index += 1 + u8::from(wide);
        }
        self.write16(address, COMMAND, command)?;
        Ok(bars)
    }

    /// Gives addresses of `window` to what a function asks for in memory, and yields its base
    /// addresses. Ports stay as they are. The function answers there once it is
    /// [enabled](Self::enable).
    ///
    /// # Errors
    ///
    /// [`Error::NoRoom`]; some of the base addresses may have been given then.
    pub fn assign(&self, address: Address, window: &mut Window) -> Result<Vec<Bar>, Error> {
        let mut bars = self.bars(address)?;
        self.command(address, 0, COMMAND_MEMORY)?;
        for bar in &mut bars {
            let BarKind::Memory { wide, .. } = bar.kind else {
                continue;
            };
            let end = if wide { u64::MAX } else { 1 << 32 };
            let (start, end) = (window.next, window.end.min(end));
            bar.address = window.take(bar.size, end).ok_or(Error::NoRoom {
                address,
                index: bar.index,
                size: bar.size,
                start,
                end,
            })?;
            self.write32(address, register(bar.index), bar.address as u32)?;
            if wide {
                let high = (bar.address >> 32) as u32;
                self.write32(address, register(bar.index + 1), high)?;
            }
        }
        Ok(bars)
    }

    /// Reads a base address register, and finds the bits that can be set.
    fn probe(&self, address: Address, index: u8) -> Result<(u32, u32), Error> {
        let register = register(index);
        let value = self.read32(address, register)?;
        self.write32(address, register, u32::MAX)?;
        let mask = self.read32(address, register)?;
        self.write32(address, register, value)?;
        Ok((value, mask))
    }
}

fn register(index: u8) -> u16 {
    BAR0 + 4 * u16::from(index)
}

/// The base address with this content and these bits that can be set; `None` where there is none.
fn decode(index: u8, wide: bool, value: u64, mask: u64) -> Option<Bar> {
    let low = mask as u32;
    let (kind, flags) = if low & IO != 0 {
        (BarKind::Io, 3)
    } else {
        let prefetchable = low & PREFETCHABLE != 0;
        (BarKind::Memory { wide, prefetchable }, 15)
    };
    // Its lowest bit that can be set is its size, also where the upper ones cannot.
    let bits = mask & !flags;
    (bits != 0).then(|| Bar {
        index,
        kind,
        address: value & !flags,
        size: 1 << bits.trailing_zeros(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_lowest_bit_that_can_be_set() {
        let memory = |wide, prefetchable| BarKind::Memory { wide, prefetchable };
        let bar = decode(0, false, 0xfe00_0000, 0xfff0_0000).unwrap();
        assert_eq!((bar.size, bar.address), (1 << 20, 0xfe00_0000));
        assert_eq!(bar.kind, memory(false, false));
        let bar = decode(2, true, 0x10_0000_000c, 0xffff_fff8_0000_000c).unwrap();
        assert_eq!((bar.size, bar.address), (32 << 30, 0x10_0000_0000));
        assert_eq!(bar.kind, memory(true, true));
        // Ports, of which some functions have 16 bits only.
        let bar = decode(4, false, 0xc001, 0xffe1).unwrap();
        assert_eq!((bar.size, bar.address, bar.kind), (32, 0xc000, BarKind::Io));
        assert_eq!(decode(0, false, 0, 0), None);
        assert_eq!(decode(0, true, 0xc, 0xc), None, "a type without an address");
    }

    #[test]
    fn a_window_gives_each_byte_once_and_ends() {
        let mut window = Window::new(0x1000, 0x7000);
        assert_eq!(window.take(0x10, u64::MAX), Some(0x1000));
        assert_eq!(window.take(0x2000, u64::MAX), Some(0x2000));
        assert_eq!(window.take(0x2000, 0x5fff), None, "beyond what it can hold");
        assert_eq!(window.take(0x4000, u64::MAX), Some(0x4000));
        assert_eq!(window.take(0x10, u64::MAX), None);
        let mut top = Window::new(u64::MAX - 0xff, u64::MAX);
        assert_eq!(top.take(1 << 63, u64::MAX), None);
    }
}
