//! Invalidation commands.
//!
//! VT-d specification, section 6.5.2 "Queued Invalidation Interface", one descriptor each; and the
//! same by registers: "Context Command Register", "IOTLB Invalidate Register" and "Invalidate Address
//! Register" of chapter 11.
//!
//! Which pages: `commands.rs` of the crate.

use crate::commands::Block;

/// One command. Domains and sources are those of the unit: 16 bits. PASID 0 is that of requests without
/// one, since context entries assign it (RID_PASID).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// All of the context cache.
    AllContexts,
    /// The context entry of one device, if it is cached with this domain.
    Context { domain: u16, source: u16 },
    /// All of the PASID cache.
    AllPasids,
    /// Entries of the PASID cache for one PASID, in one domain.
    Pasid { domain: u16, pasid: u32 },
    /// All of the IOTLB and of the paging-structure caches.
    All,
    /// All of a domain.
    Domain { domain: u16 },
    /// Pages of a domain; the caches of upper levels only if not `leaf_only`.
    Pages {
        domain: u16,
        block: Block,
        leaf_only: bool,
    },
    /// All first-stage translations of one PASID, in one domain.
    FirstStage { domain: u16, pasid: u32 },
    /// Pages of these.
    FirstStagePages {
        domain: u16,
        pasid: u32,
        block: Block,
        leaf_only: bool,
    },
    /// Pages in a device's TLB.
    DeviceTlb(InDevice),
}

/// Pages in a device's TLB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InDevice {
    pub(super) source: u16,
    pub(super) pasid: u32,
    /// How many invalidations the device takes at a time, 0 for 32.
    pub(super) depth: u8,
    /// The physical function for which they are counted, 0 where the unit does not count (PFSID). The
    /// driver does not know the physical function of a virtual one, so each counts for itself.
    pub(super) physical: u16,
    pub(super) block: Block,
}

impl InDevice {
    /// Without a PASID, sections "Device-TLB Invalidate Descriptor" (6.5.2.5), and with one,
    /// "PASID-based-Device-TLB Invalidate Descriptor" (6.5.2.6).
    const fn descriptor(self) -> [u64; 2] {
        let (source, depth) = (self.source as u64, self.depth as u64 & 0x1f);
        let physical = self.physical as u64;
        let physical = (physical & 0xf) << 12 | (physical >> 4) << 52;
        let (address, size) = self.block.sized();
        match self.pasid {
            0 => [
                0x3 | physical | depth << 16 | source << 32,
                address | size as u64,
            ],
            pasid => [
                0x8 | physical | depth << 4 | source << 16 | (pasid as u64) << 32,
                address | (size as u64) << 11,
            ],
        }
    }
}

/// The second word of a page-selective descriptor, and the Invalidate Address Register.
const fn word(block: Block, leaf_only: bool) -> u64 {
    block.address | (leaf_only as u64) << 6 | block.mask as u64
}

/// DR and DW in a descriptor, and from bit 48 on in the register.
const fn drain((reads, writes): (bool, bool)) -> (u64, u64) {
    let (reads, writes) = (reads as u64, writes as u64);
    (reads << 7 | writes << 6, reads << 49 | writes << 48)
}

/// A command given through registers.
pub(super) enum ByRegister {
    /// The Context Command Register.
    Context(u64),
    /// The IOTLB Invalidate Register, and the Invalidate Address Register before it.
    Iotlb(u64, Option<u64>),
    /// There is no such register.
    None,
}

impl Command {
    /// The first two words of the descriptor; what follows is zero. `draining` is (reads, writes).
    pub(super) fn descriptor(self, draining: (bool, bool)) -> [u64; 2] {
        let (drain, _) = drain(draining);
        let granularity = |g: u64| g << 4;
        let of = |domain: u16| u64::from(domain) << 16;
        let tagged = |pasid: u32| u64::from(pasid) << 32;
        match self {
            Self::AllContexts => [0x1 | granularity(1), 0],
            Self::Context { domain, source } => [
                0x1 | granularity(3) | of(domain) | u64::from(source) << 32,
                0,
            ],
            Self::All => [0x2 | granularity(1) | drain, 0],
            Self::Domain { domain } => [0x2 | granularity(2) | drain | of(domain), 0],
            Self::Pages {
                domain,
                block,
                leaf_only,
            } => [
                0x2 | granularity(3) | drain | of(domain),
                word(block, leaf_only),
            ],
            // These two drain without being asked.
            Self::FirstStage { domain, pasid } => {
                [0x6 | granularity(2) | of(domain) | tagged(pasid), 0]
            }
            Self::FirstStagePages {
                domain,
                pasid,
                block,
                leaf_only,
            } => [
                0x6 | granularity(3) | of(domain) | tagged(pasid),
                word(block, leaf_only),
            ],
            Self::AllPasids => [0x7 | granularity(3), 0],
            Self::Pasid { domain, pasid } => [0x7 | granularity(1) | of(domain) | tagged(pasid), 0],
            Self::DeviceTlb(what) => what.descriptor(),
        }
    }

    /// The same through registers. Scalable mode has only the queue.
    pub(super) fn by_register(self, draining: (bool, bool)) -> ByRegister {
        const GO: u64 = 1 << 63;
        let (_, drain) = drain(draining);
        let context = |g: u64| GO | g << 61;
        let iotlb = |g: u64, domain: u16| GO | g << 60 | drain | u64::from(domain) << 32;
        match self {
            Self::AllContexts => ByRegister::Context(context(1)),
            Self::Context { domain, source } => {
                ByRegister::Context(context(3) | u64::from(source) << 16 | u64::from(domain))
            }
            Self::All => ByRegister::Iotlb(iotlb(1, 0), None),
            Self::Domain { domain } => ByRegister::Iotlb(iotlb(2, domain), None),
            Self::Pages {
                domain,
                block,
                leaf_only,
            } => ByRegister::Iotlb(iotlb(3, domain), Some(word(block, leaf_only))),
            Self::AllPasids
            | Self::Pasid { .. }
            | Self::FirstStage { .. }
            | Self::FirstStagePages { .. }
            | Self::DeviceTlb(_) => ByRegister::None,
        }
    }
}
