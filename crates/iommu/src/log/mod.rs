//! Lines of a kernel's log, decoded to facts.
//!
//! [`strip`] takes off a transport's prefix (dmesg, journal, `/dev/kmsg`, colours). A [`Reader`] is fed with one
//! message at a time and yields [`LogEvent`]s: a [`FaultRecord`] for each fault, also where a kernel prints one fault on
//! several lines and other lines stand between them; suppressed messages; and, never dropped silently, lines of an
//! IOMMU's driver that look like a fault and are not decoded.
//!
//! Facts only: the unit, the device, the address, the access, the code with its name and meaning by the
//! specification, and the [class](Class) that follows from the code. The reason behind a fault is a caller's to
//! find. Memory is bounded, whatever the log says: few records wait for further lines, and names are cut.
//!
//! ```
//! use iommu::log::{FaultAccess, Class, LogEvent, Reader, strip};
//!
//! let mut reader = Reader::new();
//! let mut events = Vec::new();
//! let log = "[  10.5] DMAR: [DMA Write] Request device [00:12.0] fault addr 0 [fault reason 05] PTE Write access is not set";
//! for (line, number) in log.lines().zip(1..) {
//!     let message = strip(line);
//!     reader.line(&message.text, number, message.time, &mut events);
//! }
//! reader.finish(&mut events);
//!
//! let [LogEvent::Fault(fault)] = &events[..] else { panic!() };
//! assert_eq!(fault.pci.unwrap().to_string(), "0000:00:12.0");
//! assert_eq!((fault.class, fault.access), (Class::NoAccess, FaultAccess::Write));
//! assert_eq!(
//!     fault.to_string(),
//!     "VT-d, device 0000:00:12.0: write at 0x0: writing is not allowed (0x5)",
//! );
//! ```

mod amdvi;
mod others;
mod prefix;
mod reader;
mod riscv;
mod smmu;
mod smmuv3;
mod text;
mod vtd;

#[cfg(test)]
mod tests;

use core::fmt;

pub use crate::codes::{Certainty, Citation, Class};
pub use prefix::{LogClock, Message, strip};
pub use reader::Reader;

/// Fact of a log.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum LogEvent {
    /// A fault, or an error of a unit ([`Class::UnitError`]): one record, however many lines it was printed on.
    Fault(Box<FaultRecord>),
    /// Messages that the kernel's rate limit has kept back.
    Suppressed(Suppressed),
    /// Faults that a unit could not record: counts of this unit's faults are lower bounds.
    Overflow(Note),
    /// Entries of tables that a driver has printed after a fault.
    Dump(Box<Dump>),
    /// A line of an IOMMU's driver that looks like a fault and is not decoded.
    Undecoded(Note),
}

/// Line of a log.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    /// Family of the unit, where the line tells it.
    pub family: Option<Family>,
    /// Text, cut to 400 bytes.
    pub text: String,
    /// Line number.
    pub line: u64,
    /// Time in seconds.
    pub time: Option<f64>,
}

/// `FUNCTION: N callbacks suppressed`, or `N messages suppressed`.
#[derive(Clone, Debug, PartialEq)]
pub struct Suppressed {
    /// Family whose function it is.
    pub family: Family,
    /// Function whose limiter it was, as printed.
    pub function: String,
    /// Number of suppressed calls of the limiter.
    pub callbacks: u64,
    /// Suppressed faults: of each interrupt's calls of the limiter, those that stand for a fault. Exact, or a lower
    /// bound (see `exact`).
    pub faults: u64,
    /// The number of faults is exact.
    pub exact: bool,
    /// Line number.
    pub line: u64,
    /// Time in seconds.
    pub time: Option<f64>,
}

/// Kind of unit, by its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Family {
    /// Intel VT-d (`DMAR`).
    Vtd,
    /// AMD's IOMMU (`AMD-Vi`).
    AmdVi,
    /// Arm's SMMU, version 3.
    SmmuV3,
    /// Arm's SMMU, versions 1 and 2, with the variants of Qualcomm and Nvidia.
    SmmuV2,
    /// The RISC-V IOMMU.
    Riscv,
    /// Apple's DART.
    Dart,
    /// Rockchip's.
    Rockchip,
    /// Allwinner's (`sun50i-iommu`).
    Allwinner,
    /// MediaTek's M4U.
    MediaTek,
    /// Qualcomm's older ones (`msm_iommu`, `qcom-iommu`).
    Qualcomm,
    /// Samsung's System MMU.
    Exynos,
    /// Nvidia's SMMU of Tegra, whose faults its memory controller reports.
    Tegra,
    /// Renesas' IPMMU.
    Ipmmu,
    /// TI's.
    Omap,
    /// virtio-iommu.
    Virtio,
    /// Unisoc's (Spreadtrum).
    Sprd,
    /// Verisilicon's.
    Verisilicon,
    /// Freescale's PAMU.
    Pamu,
}

impl Family {
    /// Name for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vtd => "VT-d",
            Self::AmdVi => "AMD-Vi",
            Self::SmmuV3 => "SMMUv3",
            Self::SmmuV2 => "SMMUv2",
            Self::Riscv => "RISC-V IOMMU",
            Self::Dart => "DART",
            Self::Rockchip => "Rockchip IOMMU",
            Self::Allwinner => "Allwinner IOMMU",
            Self::MediaTek => "MediaTek M4U",
            Self::Qualcomm => "Qualcomm IOMMU",
            Self::Exynos => "Exynos System MMU",
            Self::Tegra => "Tegra SMMU",
            Self::Ipmmu => "Renesas IPMMU",
            Self::Omap => "OMAP IOMMU",
            Self::Virtio => "virtio-iommu",
            Self::Sprd => "Unisoc IOMMU",
            Self::Verisilicon => "Verisilicon IOMMU",
            Self::Pamu => "Freescale PAMU",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Address of a PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PciAddress {
    /// Segment; 0 where the log has none.
    pub segment: u32,
    /// Bus.
    pub bus: u8,
    /// Device.
    pub device: u8,
    /// Function.
    pub function: u8,
}

impl PciAddress {
    /// The function with the requester id `id`.
    #[must_use]
    pub const fn from_id(segment: u32, id: u16) -> Self {
        Self {
            segment,
            bus: (id >> 8) as u8,
            device: (id >> 3 & 0x1f) as u8,
            function: (id & 7) as u8,
        }
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            segment,
            bus,
            device,
            function,
        } = self;
        write!(f, "{segment:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// Address of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// The address.
    pub value: u64,
    /// False: the unit reports the page of 4 KiB only.
    pub exact: bool,
}

/// Access that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FaultAccess {
    /// A read.
    Read,
    /// A write, or an atomic operation.
    Write,
    /// A fetch of instructions.
    Execute,
    /// Nothing was accessed, or the line does not tell.
    Unknown,
}

impl FaultAccess {
    /// `read`, `write`, `execute` or `unknown`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Execute => "execute",
            Self::Unknown => "unknown",
        }
    }
}

/// Stage of translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// First stage.
    One,
    /// Second stage.
    Two,
}

/// Fault, as a kernel has printed it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FaultRecord {
    /// Kind of unit.
    pub family: Family,
    /// Name of the unit, as printed (`70c00000.iommu`, `ivhd0`), if it was.
    pub unit: Option<String>,
    /// The device, where the line has its PCI address.
    pub pci: Option<PciAddress>,
    /// The device, where the line has a number of the unit's: stream id, device id, master, endpoint.
    pub id: Option<u64>,
    /// The device, where the line has a name that is no PCI address (`client:` of new kernels, masters of Exynos).
    pub client: Option<String>,
    /// PASID, substream id or process id, if the request had one.
    pub pasid: Option<u32>,
    /// Domain, if printed.
    pub domain: Option<u32>,
    /// The I/O virtual address.
    pub address: Option<Address>,
    /// The refused access.
    pub access: FaultAccess,
    /// The unit's code: fault reason, event number, cause, or the bits of a status register.
    pub code: Option<u32>,
    /// Name of the code in the specification; empty where it has only a number.
    pub name: &'static str,
    /// Meaning of the code.
    pub meaning: &'static str,
    /// Class of the fault.
    pub class: Class,
    /// Certainty of the class.
    pub certainty: Certainty,
    /// Document that says so.
    pub source: Citation,
    /// Stage at which the translation failed, where it is known.
    pub stage: Option<Stage>,
    /// The request asked for privilege, where the line tells it.
    pub privileged: Option<bool>,
    /// Address after the first stage, where a second one has failed on it.
    pub ipa: Option<u64>,
    /// Bits that were set, by their names in the specification.
    pub flags: Vec<&'static str>,
    /// Registers and fields as printed, by their names.
    pub fields: Vec<(&'static str, u64)>,
    /// Text after the code, as the kernel has printed it; cut to 200 bytes.
    pub text: String,
    /// Time of the first line, in seconds.
    pub time: Option<f64>,
    /// Numbers of the lines, ascending.
    pub lines: Vec<u64>,
}

impl FaultRecord {
    pub(crate) fn new(family: Family, line: reader::Line<'_>) -> Self {
        Self {
            family,
            unit: None,
            pci: None,
            id: None,
            client: None,
            pasid: None,
            domain: None,
            address: None,
            access: FaultAccess::Unknown,
            code: None,
            name: "",
            meaning: "",
            class: Class::Unknown,
            certainty: Certainty::Unknown,
            source: Citation {
                document: "",
                section: "",
            },
            stage: None,
            privileged: None,
            ipa: None,
            flags: Vec::new(),
            fields: Vec::new(),
            text: String::new(),
            time: line.time,
            lines: line.numbers().collect(),
        }
    }

    /// The device as printed: a PCI address in full, a name, or a number in the form `0x19c3`.
    #[must_use]
    pub fn device(&self) -> Option<String> {
        match (self.pci, &self.client, self.id) {
            (Some(pci), ..) => Some(pci.to_string()),
            (None, _, Some(id)) => Some(format!("{id:#x}")),
            (None, Some(name), None) => Some(name.clone()),
            (None, None, None) => None,
        }
    }

    /// Field of this name.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<u64> {
        let mut fields = self.fields.iter();
        fields
            .find(|(key, _)| *key == name)
            .map(|(_, value)| *value)
    }
}

impl fmt::Display for FaultRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.family)?;
        if let Some(unit) = &self.unit {
            write!(f, " {unit}")?;
        }
        if let Some(device) = self.device() {
            write!(f, ", device {device}")?;
        }
        if let Some(pasid) = self.pasid {
            write!(f, " PASID {pasid:#x}")?;
        }
        write!(f, ": ")?;
        if self.access != FaultAccess::Unknown {
            write!(f, "{} ", self.access.name())?;
        }
        if let Some(address) = self.address {
            write!(f, "at {:#x}: ", address.value)?;
        }
        f.write_str(self.meaning)?;
        match (self.name, self.code) {
            ("", None) => Ok(()),
            ("", Some(code)) => write!(f, " ({code:#x})"),
            (name, _) => write!(f, " ({name})"),
        }
    }
}

/// Entries of tables, from the root on, that a driver has printed after a fault.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Dump {
    /// Kind of unit.
    pub family: Family,
    /// Name of the unit (`dmar0`).
    pub unit: Option<String>,
    /// The address whose walk was printed.
    pub iova: u64,
    /// The entries.
    pub entries: Vec<DumpEntry>,
    /// The table that was not there, as printed; `None`: the walk went on to a leaf, or the dump was cut.
    pub absent: Option<Absent>,
    /// Numbers of the lines, ascending.
    pub lines: Vec<u64>,
    /// Time of the first line, in seconds.
    pub time: Option<f64>,
}

/// Entry of a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DumpEntry {
    /// Table that it stands in.
    pub table: DumpTable,
    /// Its words, the lowest first; of those that were not printed 0.
    pub words: [u64; 2],
}

/// Table of a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DumpTable {
    /// Root table.
    Root,
    /// Root table of scalable mode.
    ScalableRoot,
    /// Context table.
    Context,
    /// PASID directory.
    PasidDirectory,
    /// Word of the entry of the PASID table, by number.
    Pasid(u32),
    /// Page table of this level; 1 holds leaves of 4 KiB.
    Page(u32),
}

/// Table that a dump says is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absent {
    /// Root table.
    Root,
    /// Context table.
    Context,
    /// PASID directory.
    PasidDirectory,
    /// PASID table.
    PasidTable,
    /// First page table.
    PageTable,
    /// Page table, or with 0 the page, below the entry of the level above.
    Level(u32),
}
