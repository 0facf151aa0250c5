//! Units that differ, with a device each, and an address space that builds domains for them.

use std::sync::Arc;

use ioas::{AttachError, DomainIds, Ioas, Ledger, MapError, Memory, Synthetic, TableBuilder};
use iommu::{
    DeviceId, DomainId, FormatSupport, Port, SoftwareConfig, SoftwareUnit, UnitCapabilities,
};
use iopt::{FormatId, HeapTables, Prot};
use runs::{Offset, PageSizes, Span};

use super::{Echo, Frail, FrailUnit, GIB, MIB, PAGE, Space, State, Watch, leaves_of};

pub(crate) const AT: u64 = 5 * GIB;
pub(crate) const SMALL: u64 = 1 << 12 | 1 << 21;
pub(crate) const ALL: u64 = SMALL | 1 << 30;

pub(crate) fn dev(n: u8) -> DeviceId {
    DeviceId::pci(1, n, 0)
}

pub(crate) type Tables = Arc<HeapTables>;

/// A unit with its device's port, which plays the device whether it is attached or not.
pub(crate) struct Machine {
    pub(crate) unit: Arc<FrailUnit>,
    pub(crate) port: Port<Tables, Echo>,
    pub(crate) device: DeviceId,
}

impl Machine {
    pub(crate) fn new(tables: &Tables, n: u8, can: UnitCapabilities) -> Self {
        Self::with(tables, n, can, |_| ())
    }

    pub(crate) fn with(
        tables: &Tables,
        n: u8,
        capabilities: UnitCapabilities,
        change: impl FnOnce(&mut FrailUnit),
    ) -> Self {
        let config = SoftwareConfig {
            capabilities,
            ..SoftwareConfig::default()
        };
        let software = SoftwareUnit::with_config(tables.clone(), Echo, config);
        let port = software.port(dev(n));
        let mut unit = FrailUnit::new(Arc::new(software));
        change(&mut unit);
        Self {
            unit: Arc::new(unit),
            port,
            device: dev(n),
        }
    }

    pub(crate) fn attach(&self, space: &mut Space) -> Result<(), AttachError> {
        space.attach((self.unit.clone(), self.device))
    }

    /// The domain of the last attach.
    pub(crate) fn domain(&self) -> DomainId {
        self.unit.attached.lock().unwrap().last().unwrap().1
    }

    pub(crate) fn read(&mut self, iova: u64) -> Option<u64> {
        let mut word = [0];
        self.port.read(iova, &mut word).ok().map(|()| word[0])
    }
}

pub(crate) fn can(format: FormatId, sizes: u64, snoop_control: bool) -> UnitCapabilities {
    let mut can = UnitCapabilities::new().with_format(FormatSupport {
        format,
        levels: 1 << 4,
        page_sizes: PageSizes::from_bits(sizes),
    });
    can.input_bits = 48;
    can.snoop_control = snoop_control;
    can
}

pub(crate) struct Bench {
    pub(crate) tables: Tables,
    pub(crate) ids: Arc<DomainIds>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) object: Arc<Frail>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) space: Space,
}

pub(crate) const FRAME: u64 = 8 * GIB;

impl Bench {
    /// No domain yet; 2 GiB of memory in runs of 1 GiB, 1 MiB and the rest.
    pub(crate) fn new() -> Self {
        let tables = Arc::new(HeapTables::with_tables(128).unwrap());
        let ids = DomainIds::new(16);
        let formats = [FormatId::VtdSs, FormatId::AmdV1];
        let runs = [
            Span::new(FRAME, GIB),
            Span::new(2 * FRAME, MIB),
            Span::new(3 * FRAME + MIB, GIB - MIB),
        ];
        let ledger = Ledger::new("a counter", Some(4 * GIB), 0);
        let object = Arc::new(Frail::new(Synthetic::new(runs)));
        Self {
            space: Ioas::over_tables(TableBuilder::new(tables.clone(), ids.clone(), formats)),
            tables,
            ids,
            memory: Memory::new(object.clone(), &ledger),
            ledger,
            object,
        }
    }

    pub(crate) fn state(&self) -> State {
        State::of(
            &self.space,
            &self.ledger,
            &self.tables,
            &[&self.object.memory],
        )
    }

    pub(crate) fn map(&mut self, iova: u64, part: Span<Offset>) -> Result<(), MapError> {
        self.space
            .observed(&mut Watch::default())
            .map(iova, &self.memory, part, Prot::RW)
    }

    /// Three areas, of which the second repeats a part of the first: in leaves of 1 GiB, of 4 KiB,
    /// and of 2 MiB and 4 KiB.
    pub(crate) fn areas(&mut self) {
        self.map(AT, Span::new(0, GIB)).unwrap();
        self.map(AT + 2 * GIB, Span::new(3 * PAGE, 5 * PAGE))
            .unwrap();
        self.map(AT + 3 * GIB, Span::new(GIB, 5 * MIB)).unwrap();
    }

    /// Values that a device must find.
    pub(crate) const SEEN: [(u64, Option<u64>); 6] = [
        (AT - 8, None),
        (AT + GIB - 8, Some(FRAME + GIB - 8)),
        (AT + 2 * GIB, Some(FRAME + 3 * PAGE)),
        (AT + 2 * GIB + 5 * PAGE, None),
        (AT + 3 * GIB + MIB - 8, Some(2 * FRAME + MIB - 8)),
        (AT + 3 * GIB + MIB, Some(3 * FRAME + MIB)),
    ];
    /// Bytes that they hold.
    pub(crate) const HELD: u64 = GIB + 5 * MIB;

    pub(crate) fn sizes(&self, domain: DomainId) -> Vec<u64> {
        let mut sizes = Vec::new();
        self.space.tables(|id, table| {
            if id == domain {
                sizes.extend(leaves_of(table).iter().map(|leaf| leaf.run.len));
            }
        });
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    pub(crate) fn end(self) {
        self.space.close().unwrap();
        assert_eq!(self.tables.in_use(), 0);
        let left = (self.object.memory.pinned(), self.ledger.in_use());
        assert_eq!(left, (0, 0));
        assert_eq!(self.ids.take(), Some(DomainId(1)), "numbers are back");
    }
}

pub(crate) fn sees(machine: &mut Machine, all: bool) {
    for (iova, pa) in Bench::SEEN {
        assert_eq!(machine.read(iova), pa.filter(|_| all), "{iova:#x}");
    }
}
