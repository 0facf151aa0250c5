//! Memory that does not give all cells of a structure, for every driver whose structures lie in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use iopt::format::{ArmConfig, ArmGranule};
use iopt::{AtomicMeta, Chain, FormatId, HeapTables, NoTables, Reserve, Root, TableMemory};

use crate::error::UnitAttachError;
use crate::registers::{Registers, SpinLock};
use crate::unit::{DeviceId, DomainId, Pasid, Unit};
use crate::{AmdVi, RiscvIommu, SmmuV3, Vtd, amdvi, riscv, smmuv3, vtd};

/// Registers that hold something, of a unit that is never enabled.
struct Fixed(&'static [(usize, u64)]);

impl Registers for Fixed {
    type Lock = SpinLock;

    fn read32(&self, offset: usize) -> u32 {
        self.read64(offset) as u32
    }
    fn read64(&self, offset: usize) -> u64 {
        let found = self.0.iter().find(|register| register.0 == offset);
        found.map_or(0, |register| register.1)
    }
    fn write32(&self, offset: usize, value: u32) {
        panic!("{offset:#x} = {value:#x}");
    }
    fn write64(&self, offset: usize, value: u64) {
        panic!("{offset:#x} = {value:#x}");
    }
    fn wait(&self, _round: u32) -> bool {
        false
    }
}

/// Gives no cells when it is asked for some once more often than this.
struct Short {
    tables: HeapTables,
    left: AtomicU64,
}

impl TableMemory for Short {
    type Cell = <HeapTables as TableMemory>::Cell;
    type Link = <HeapTables as TableMemory>::Link;
    type Count = <HeapTables as TableMemory>::Count;
    const TABLE_BYTES: u64 = HeapTables::TABLE_BYTES;

    fn entries(&self, table: u64, count: usize) -> &[Self::Cell] {
        match self.left.fetch_sub(1, Ordering::Relaxed) {
            1 => &[],
            _ => self.tables.entries(table, count),
        }
    }
    fn meta(&self, table: u64) -> &AtomicMeta {
        self.tables.meta(table)
    }
    fn last_address(&self) -> u64 {
        self.tables.last_address()
    }
    fn reserve(&self, count: u64) -> Result<Reserve, NoTables> {
        self.tables.reserve(count)
    }
    fn allocate(&self, bytes: usize) -> Result<u64, NoTables> {
        self.tables.allocate(bytes)
    }
    fn give_back(&self, reserve: Reserve) {
        self.tables.give_back(reserve);
    }
    fn reclaim(&self, chain: Chain) {
        self.tables.reclaim(chain);
    }
}

/// Attaches a device while each call for cells in turn gives none, and counts how often that is named.
fn named<U: Unit>(unit: impl Fn(Arc<Short>) -> U, format: FormatId, pasid: Option<Pasid>) -> u64 {
    let device = DeviceId::pci(1, 2, 3);
    let root = Root {
        format,
        address: 0x10_0000,
        levels: 4,
    };
    let mut seen = 0;
    for nth in 1.. {
        let memory = Arc::new(Short {
            tables: HeapTables::with_tables(64).unwrap(),
            left: AtomicU64::new(0),
        });
        let unit = unit(memory.clone());
        memory.left.store(nth, Ordering::Relaxed);
        let result = match pasid {
            None => unit.attach(device, DomainId(7), root),
            Some(pasid) => unit.attach_pasid(device, pasid, DomainId(7), root),
        };
        if memory.left.load(Ordering::Relaxed) as i64 > 0 {
            assert_eq!(result, Ok(()));
            return seen;
        }
        match result {
            // Such cells are only looked at.
            Ok(()) => {}
            Err(UnitAttachError::Cells {
                device: of,
                address,
            }) => {
                assert_eq!((of, address % 4096), (device, 0));
                assert!(address <= memory.last_address());
                seen += 1;
            }
            Err(other) => panic!("{nth}: {other}"),
        }
    }
    seen
}

#[test]
fn memory_that_does_not_give_all_cells_is_not_said_to_be_short_of_tables() {
    // VT-d: version 4; domains of 16 bits, 4 levels, 48 bits; a queue, scalable mode, PASIDs of 8 bits.
    const VTD: Fixed = Fixed(&[
        (0x00, 0x40),
        (0x08, 6 | 0b100 << 8 | 47 << 16),
        (0x10, 1 | 1 << 1 | 1 << 43 | 1 << 46 | 1 << 40 | 7 << 35),
    ]);
    let config = |mode, pasid_bits| vtd::Config {
        mode,
        pasid_bits,
        ..vtd::Config::default()
    };
    let second = FormatId::VtdSs;
    for (mode, bits, pasid) in [
        (vtd::Mode::Legacy, 0, None),
        (vtd::Mode::ScalableSecond, 8, Some(Pasid(5))),
    ] {
        let unit = |memory| Vtd::new(VTD, memory, config(mode, bits)).unwrap();
        assert!(named(unit, second, pasid) > 0, "{mode:?}");
    }
    // AMD: INVALIDATE_IOMMU_ALL, GTSup, GIoSup, two levels of guest CR3 tables, PASIDs.
    const AMD: Fixed = Fixed(&[(0x30, 1 << 6 | 1 << 4 | 1 << 48 | 1 << 14 | 15 << 32)]);
    for (mode, format, pasid_bits, pasid) in [
        (amdvi::Mode::Host, FormatId::AmdV1, 0, None),
        (amdvi::Mode::Guest, FormatId::X86_64, 12, Some(Pasid(5))),
    ] {
        let config = amdvi::Config {
            mode,
            last_device: 0x3ff,
            pasid_bits,
            ..amdvi::Config::default()
        };
        let unit = |memory| AmdVi::new(AMD, memory, config).unwrap();
        assert!(named(unit, format, pasid) > 0, "{mode:?}");
    }
    // SMMUv3: both stages, AArch64, coherent, 16 bits of ASIDs and VMIDs, stream tables and context descriptors of
    // two levels; queues, StreamIDs of 16 bits, PASIDs of 8; granules of 4 KiB and 48 bits.
    const SMMU: Fixed = Fixed(&[
        (
            0x00,
            3 | 1 << 3 | 1 << 4 | 1 << 12 | 1 << 18 | 1 << 19 | 2 << 21 | 1 << 27,
        ),
        (0x04, 16 | 8 << 6 | 8 << 16 | 8 << 21),
        (0x14, 5 | 1 << 4),
    ]);
    let config = smmuv3::Config {
        pasid_bits: 8,
        ..smmuv3::Config::default()
    };
    let unit = |memory| SmmuV3::new(SMMU, memory, config).unwrap();
    let stage1 = FormatId::ArmStage1(ArmConfig {
        granule: ArmGranule::K4,
        input_bits: 48,
        upper: false,
    });
    assert!(named(unit, stage1, None) > 0);
    assert!(named(unit, stage1, Some(Pasid(5))) > 0);
    // RISC-V: version 1, Sv48, Sv48x4, PD8, 56 bits.
    const RISCV: Fixed = Fixed(&[(0, 0x10 | 1 << 10 | 1 << 18 | 56 << 32 | 1 << 38)]);
    let config = riscv::Config {
        pasid_bits: 8,
        ..riscv::Config::default()
    };
    let unit = |memory| RiscvIommu::new(RISCV, memory, config).unwrap();
    assert!(named(unit, FormatId::RiscV, Some(Pasid(5))) > 0);
    assert!(named(unit, FormatId::RiscVG, None) > 0);
}
