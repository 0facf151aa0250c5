//! A balloon's driver on the crate `virtio-drivers`, which has none; devices reach its memory through an address space.

use std::sync::{Arc, OnceLock};

use dmaspace::virtio_balloon::{GuestPage, LePfns, MessageFormat as _, MessageSource};
use dmaspace::{AnyTable, DomainId, FormatId, HeapTables, Ioas, Ledger};
use dmaspace::{DriverMemory, GuestAddr, HalMemory, HostPages, PageSizes, Span, VirtioHal};
use virtio_drivers::{device::common::Feature, queue::VirtQueue, transport::Transport};

static MEMORY: OnceLock<DriverMemory> = OnceLock::new();

struct Guest;

impl HalMemory for Guest {
    fn memory() -> Option<&'static DriverMemory> {
        MEMORY.get()
    }
}

struct Balloon<T>(T, [VirtQueue<VirtioHal<Guest>, 64>; 2]);

impl<T: Transport> Balloon<T> {
    fn new(mut device: T) -> virtio_drivers::Result<Self> {
        device.begin_init(Feature::VERSION_1);
        let inflate = VirtQueue::new(&mut device, 0, false, false)?;
        let deflate = VirtQueue::new(&mut device, 1, false, false)?;
        device.finish_init();
        Ok(Self(device, [inflate, deflate]))
    }

    /// Sends `pages` on inflateq (0) or deflateq (1), and waits for the answers; then `held` are in the balloon.
    fn send(&mut self, queue: usize, pages: Span<GuestAddr>, held: u64) -> anyhow::Result<()> {
        let (mut source, mut message) =
            (MessageSource::new([pages], GuestPage::SIZE_4K), [0; 1024]);
        while let len @ 1.. = LePfns.encode(&mut source, &mut message)? {
            self.1[queue].add_notify_wait_pop(&[&message[..len]], &mut [], &mut self.0)?;
        }
        let actual = (held / 4096) as u32;
        Ok(self.0.write_config_space(4, actual.to_le())?)
    }
}

fn main() -> anyhow::Result<()> {
    let tables = Arc::new(HeapTables::with_tables(64)?);
    let table = AnyTable::new(FormatId::VtdSs, 4, PageSizes::from_bits(u64::MAX), tables)?;
    let space = Arc::new(Ioas::over_table(DomainId(1), table));
    let (device, mapping) = machine::in_process::InProcess::new(&space)?;
    let pages = HostPages::new(mapping, &Ledger::new("DMA memory", Some(16 << 20), 0));
    device.add_memory(pages.memory());
    let memory = DriverMemory::new(space, pages, 64 << 10)?;
    MEMORY.get_or_init(|| memory);
    let mut balloon = Balloon::new(device)?;
    let pages = Span::new(32 << 20, 16 << 20);
    balloon.send(0, pages, pages.len)?;
    assert_eq!(balloon.0.state(), (pages.len, pages.len, 0));
    balloon.send(1, pages, 0)
}
