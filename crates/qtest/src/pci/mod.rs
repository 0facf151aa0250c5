//! PCI, as firmware finds it: nothing is set up.
//!
//! A function's configuration space is reached through two ports or, with PCI Express, as memory
//! (ECAM). [`Config::functions`] tells who is there, [`Config::assign`] gives addresses to their memory,
//! [`Config::enable`] lets them answer at these and do DMA.
//!
//! Source: PCI Local Bus Specification 3.0 (below "PCI"), PCI Express Base Specification 5.0 ("PCIe").

use std::fmt;

use crate::{Error as MachineError, Machine};

mod bar;

pub use bar::{Bar, BarKind, Window};

/// Identification of the vendor; all ones where no function is (PCI, section 6.2.1).
pub const VENDOR: u16 = 0x00;
/// Identification of the device, by the vendor's list.
pub const DEVICE: u16 = 0x02;
/// The command register, 2 bytes (PCI, section 6.2.2).
pub const COMMAND: u16 = 0x04;
/// [`COMMAND`]: answers at its ports.
pub const COMMAND_IO: u16 = 1 << 0;
/// [`COMMAND`]: answers at its memory addresses.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// [`COMMAND`]: may do DMA.
pub const COMMAND_MASTER: u16 = 1 << 2;
/// Revision, in the lowest byte, and class.
pub const CLASS: u16 = 0x08;
/// Layout of the header; bit 7: there may be more functions than one.
pub const HEADER_TYPE: u16 = 0x0e;
/// The first base address register.
pub const BAR0: u16 = 0x10;

/// The port that takes an address and the one where its 4 bytes then are (PCI, section 3.2.2.3.2
/// "Software Generation of Configuration Transactions").
const CONFIG_ADDRESS: u16 = 0xcf8;
const CONFIG_DATA: u16 = 0xcfc;

/// The q35's register PCIEXBAR in the host bridge (Intel 3 Series Express Chipset, "PCIEXBAR"): where
/// configuration space lies in memory, and in bit 0 whether it does. Bits 2:1 are 0 for 256 MiB.
const PCIEXBAR: u16 = 0x60;

/// Bytes of the configuration space of 256 buses (PCIe, section 7.2.2).
const ECAM_BYTES: u64 = 256 << 20;

/// Why something of PCI was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine's command failed.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// An offset at which the register does not lie in configuration space, or not whole.
    #[error("offset {offset:#x} of {bytes} bytes in a configuration space of {size:#x}")]
    Offset {
        /// The offset, bytes.
        offset: u16,
        /// Bytes of the register.
        bytes: u16,
        /// Bytes of configuration space, as it is reached.
        size: u16,
    },
    /// A place for configuration space that it cannot have.
    #[error("configuration space cannot lie at {base:#x}: no multiple of 256 MiB below 2^36")]
    Ecam {
        /// The place.
        base: u64,
    },
    /// There is no such function.
    #[error("there is no function {0}")]
    Absent(Address),
    /// The window has no room for a base address.
    #[error("{address}: no room for {size:#x} bytes of BAR {index} in {start:#x}..{end:#x}")]
    NoRoom {
        /// The function.
        address: Address,
        /// The base address register.
        index: u8,
        /// Bytes that it asks for.
        size: u64,
        /// First address that is free.
        start: u64,
        /// First address behind the window, or behind what the register can hold.
        end: u64,
    },
}

/// A function: bus, device, function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(u16);

impl Address {
    /// The function `bus:device.function`; a device is taken modulo 32 and a function modulo 8.
    pub const fn new(bus: u8, device: u8, function: u8) -> Self {
        Self((bus as u16) << 8 | (device as u16 & 0x1f) << 3 | function as u16 & 7)
    }

    /// The number by which an IOMMU knows it.
    pub const fn requester_id(self) -> u16 {
        self.0
    }
}

/// `00:05.0`
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bus, device, function) = (self.0 >> 8, self.0 >> 3 & 0x1f, self.0 & 7);
        write!(f, "{bus:02x}:{device:02x}.{function}")
    }
}

/// A function that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function {
    /// Where.
    pub address: Address,
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID, by the vendor's list.
    pub device: u16,
    /// Base class, sub-class and programming interface, a byte each (PCI, section 6.2.1).
    pub class: u32,
    /// Layout of the header, without bit 7.
    pub header: u8,
}

/// The way to configuration space.
#[derive(Clone, Copy, Debug)]
pub struct Config<'a> {
    machine: &'a Machine,
    /// Address of configuration space in memory, or by ports.
    ecam: Option<u64>,
}

impl<'a> Config<'a> {
    /// Access by the ports of a PC. A register takes two commands, between which no other thread may
    /// use the same ports.
    pub const fn ports(machine: &'a Machine) -> Self {
        let ecam = None;
        Self { machine, ecam }
    }

    /// As memory at `base`, where it lies already.
    pub const fn ecam(machine: &'a Machine, base: u64) -> Self {
        let ecam = Some(base);
        Self { machine, ecam }
    }

    /// Places the configuration space of a q35 at `base` in memory, 256 MiB, and uses it there.
    ///
    /// # Errors
    ///
    /// [`Error::Ecam`] unless `base` is a multiple of 256 MiB below 64 GiB.
    pub fn q35(machine: &'a Machine, base: u64) -> Result<Self, Error> {
        if base % ECAM_BYTES != 0 || base >> 36 != 0 {
            return Err(Error::Ecam { base });
        }
        let (ports, bridge) = (Self::ports(machine), Address::new(0, 0, 0));
        ports.write32(bridge, PCIEXBAR + 4, (base >> 32) as u32)?;
        ports.write32(bridge, PCIEXBAR, base as u32 | 1)?;
        Ok(Self::ecam(machine, base))
    }

    /// The functions of a bus.
    pub fn functions(&self, bus: u8) -> Result<Vec<Function>, Error> {
        let mut found = Vec::new();
        for device in 0..32 {
            let Some(first) = self.function(Address::new(bus, device, 0))? else {
                continue;
            };
            found.push(first);
            if self.read8(first.address, HEADER_TYPE)? & 0x80 == 0 {
                continue;
            }
            for function in 1..8 {
                found.extend(self.function(Address::new(bus, device, function))?);
            }
        }
        Ok(found)
    }

    /// The function at `address`, if there is one.
    pub fn function(&self, address: Address) -> Result<Option<Function>, Error> {
        let id = self.read32(address, VENDOR)?;
        if id as u16 == u16::MAX {
            return Ok(None);
        }
        Ok(Some(Function {
            address,
            vendor: id as u16,
            device: (id >> 16) as u16,
            class: self.read32(address, CLASS)? >> 8,
            header: self.read8(address, HEADER_TYPE)? & 0x7f,
        }))
    }

    /// Lets a function answer at its memory addresses and do DMA.
    pub fn enable(&self, address: Address) -> Result<(), Error> {
        self.command(address, COMMAND_MEMORY | COMMAND_MASTER, 0)
    }

    /// Sets bits of the [command register](COMMAND), and clears others.
    pub fn command(&self, address: Address, set: u16, clear: u16) -> Result<(), Error> {
        let command = self.read16(address, COMMAND)?;
        self.write16(address, COMMAND, command & !clear | set)
    }

    /// Where a register is to be found: at an address, or at the data port once the other is set.
    fn select(&self, address: Address, offset: u16, bytes: u16) -> Result<Place, Error> {
        let size = if self.ecam.is_some() { 4096 } else { 256 };
        if offset % bytes != 0 || offset >= size {
            return Err(Error::Offset {
                offset,
                bytes,
                size,
            });
        }
        let function = u64::from(address.0);
        if let Some(base) = self.ecam {
            return Ok(Place::Memory(base + (function << 12) + u64::from(offset)));
        }
        let enable = 1 << 31;
        let word = u32::from(offset & !3);
        self.machine
            .outl(CONFIG_ADDRESS, enable | u32::from(address.0) << 8 | word)?;
        Ok(Place::Port(CONFIG_DATA + (offset & 3)))
    }
}

/// Where a register is.
enum Place {
    Memory(u64),
    Port(u16),
}

macro_rules! registers {
    ($(
        $read:ident $readm:ident $inp:ident,
        $write:ident $writem:ident $outp:ident, $value:ty, $bytes:literal;
    )*) => {
        /// Registers of 1, 2 and 4 bytes; offsets are multiples of that.
        #[allow(missing_docs)] // Said above.
        impl Config<'_> {$(
            pub fn $read(&self, address: Address, offset: u16) -> Result<$value, Error> {
                Ok(match self.select(address, offset, $bytes)? {
                    Place::Memory(at) => self.machine.$readm(at)?,
                    Place::Port(port) => self.machine.$inp(port)?,
                })
            }

            pub fn $write(
                &self,
                address: Address,
                offset: u16,
                value: $value,
            ) -> Result<(), Error> {
                Ok(match self.select(address, offset, $bytes)? {
                    Place::Memory(at) => self.machine.$writem(at, value)?,
                    Place::Port(port) => self.machine.$outp(port, value)?,
                })
            }
        )*}
    };
}

registers! {
    read8 readb inb, write8 writeb outb, u8, 1;
    read16 readw inw, write16 writew outw, u16, 2;
    read32 readl inl, write32 writel outl, u32, 4;
}
