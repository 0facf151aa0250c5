//! virtio's IOMMU behind a front end of vhost-user.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vhost_user_backend::VringT as _;
use virtio_iommu::wire::{EVENT_QUEUE, NUM_QUEUES, REQUEST_QUEUE};
use virtio_iommu::{Domains, FaultReport, MemoryRegion, RingError, Served, VirtioIommu};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{GuestAddressSpace as _, GuestMemoryMmap};

use super::link::{Backend, BackendMemory};
use super::vring::Vring;

/// The device is one of the standard, not a legacy one (`VIRTIO_F_VERSION_1`; VIRTIO 1.3, 6).
const VERSION_1: u64 = 1 << 32;

/// Faults that wait for the thread of the queues; what comes beyond is counted.
const MOST_FAULTS: usize = 256;

/// Owner of the address spaces, which supplies the guest's memory for them.
pub trait IommuHost: Domains + Send + 'static {
    /// The guest has this memory from now on, in these regions. A region that it had before is best
    /// given by the same memory object: others would be pinned once more.
    ///
    /// # Errors
    ///
    /// The memory cannot be used; the error goes to the front end.
    fn regions(&mut self, memory: &GuestMemoryMmap) -> io::Result<Vec<MemoryRegion>>;

    /// The queues cannot go on: the driver did what no driver does.
    fn broken(&mut self, error: &RingError) {
        let _ = error;
    }
}

/// virtio's IOMMU for a monitor that speaks vhost-user, to be served by a [`Link`](super::Link).
///
/// The device outlives its front ends. What a driver has mapped goes when it resets the device
/// (`VHOST_USER_RESET_DEVICE`). Not every front end tells: QEMU's `vhost-user-test-device` (11.1.3) only stops
/// the queues, as for a machine that is paused. So a queue of requests that begins elsewhere than where it
/// stood is taken for another driver's, which finds the device reset; and a monitor that sees a guest end must
/// [reset](VirtioIommu::reset_system) it.
///
/// The endpoints' DMA is done on this side: by devices in this process, or by other back ends that get
/// their translations from here.
#[derive(Debug)]
pub struct Iommu<H: IommuHost> {
    inner: Mutex<Inner<H>>,
}

#[derive(Debug)]
struct Inner<H: IommuHost> {
    device: VirtioIommu<H>,
    memory: Option<Arc<GuestMemoryMmap>>,
    /// Last position of the queue of requests.
    at: u16,
    /// A driver has taken these features, and the queue was not looked at yet.
    fresh: Option<u64>,
    faults: Vec<FaultReport>,
    lost: u64,
}

impl<H: IommuHost> Iommu<H> {
    /// `device`, without a front end.
    pub const fn new(device: VirtioIommu<H>) -> Self {
        Self {
            inner: Mutex::new(Inner {
                device,
                memory: None,
                at: 0,
                fresh: None,
                faults: Vec::new(),
                lost: 0,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<H>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the device, or changes it, while no request is under way.
    pub fn with<R>(&self, look: impl FnOnce(&mut VirtioIommu<H>) -> R) -> R {
        look(&mut self.lock().device)
    }

    /// Has the driver told of `faults` as soon as the thread of the queues [is woken](super::Link::wake).
    /// Beyond 256 that wait they are only counted.
    pub fn report(&self, faults: impl IntoIterator<Item = FaultReport>) {
        let mut inner = self.lock();
        for fault in faults {
            match inner.faults.len() < MOST_FAULTS {
                true => inner.faults.push(fault),
                false => inner.lost += 1,
            }
        }
    }

    /// Faults that the driver was not told of because too many waited here, or because it did not serve its
    /// queue of events, or was reset. Those for which it had no buffer are counted by the device
    /// ([`RequestCounters::dropped`](virtio_iommu::RequestCounters)).
    pub fn lost(&self) -> u64 {
        self.lock().lost
    }
}

/// Position of the queue of requests.
fn position(vrings: &[Vring]) -> u16 {
    let vring = vrings.get(REQUEST_QUEUE);
    vring.map_or(0, |vring| vring.get_ref().get_queue().next_avail())
}

impl<H: IommuHost> Inner<H> {
    /// Looks at the queue of requests when it is used for the first time since features were taken: whether
    /// it goes on where it stood. See [`Iommu`].
    fn settle(&mut self, at: u16) {
        if let Some(features) = self.fresh.take().filter(|_| at != self.at) {
            self.reset();
            let _ = self.device.ack_features(features);
        }
    }

    /// The driver is another one, which is not told of the faults under the one before.
    fn reset(&mut self) {
        // An endpoint that cannot be detached was reported.
        self.device.reset();
        self.lost += self.faults.len() as u64;
        self.faults.clear();
    }

    /// Has `serve` use a queue, and tells the driver if it is to be told.
    fn serve(
        &mut self,
        queue: usize,
        vrings: &[Vring],
        mut serve: impl FnMut(
            &mut VirtioIommu<H>,
            &mut Queue,
            &GuestMemoryMmap,
        ) -> Result<Served, RingError>,
    ) {
        let memory = self.memory.clone();
        let (Some(memory), Some(vring)) = (memory, vrings.get(queue)) else {
            return;
        };
        let mut vring = vring.get_mut();
        loop {
            match serve(&mut self.device, vring.get_queue_mut(), &memory) {
                Ok(served) => {
                    if served.notify {
                        // A front end that has gone is not notified.
                        let _ = vring.signal_used_queue();
                    }
                    if !served.more || served.used == 0 {
                        return;
                    }
                }
                Err(error) => {
                    // Some requests may be back.
                    let _ = vring.signal_used_queue();
                    return self.device.back_end().broken(&error);
                }
            }
        }
    }
}

impl<H: IommuHost> Backend for Iommu<H> {
    const QUEUES: u16 = NUM_QUEUES as u16;

    fn features(&self) -> u64 {
        self.lock().device.features() | VERSION_1
    }

    fn negotiated(&self, features: u64) {
        // Features that are not offered leave nothing negotiated: then no queue is served.
        let mut inner = self.lock();
        let _ = inner.device.ack_features(features);
        inner.fresh = Some(features);
    }

    fn read_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut bytes = vec![0; size as usize];
        self.lock().device.read_config(offset.into(), &mut bytes);
        bytes
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) {
        self.lock().device.write_config(offset.into(), bytes);
    }

    fn memory(&self, memory: &BackendMemory) -> io::Result<()> {
        let memory = memory.memory().into_inner();
        let mut inner = self.lock();
        let regions = inner.device.back_end().regions(&memory)?;
        let set = inner.device.set_memory(regions);
        set.map_err(io::Error::other)?;
        inner.memory = Some(memory);
        Ok(())
    }

    fn kicked(&self, queue: u16, vrings: &[Vring]) {
        // The other queue is filled by faults.
        if usize::from(queue) == REQUEST_QUEUE {
            let mut inner = self.lock();
            inner.settle(position(vrings));
            inner.serve(REQUEST_QUEUE, vrings, |device, queue, memory| {
                device.requests(queue, memory)
            });
            inner.at = position(vrings);
        }
    }

    fn woken(&self, vrings: &[Vring]) {
        let mut inner = self.lock();
        let mut faults = std::mem::take(&mut inner.faults);
        // A device may fault before there is a driver.
        let there = vrings.get(EVENT_QUEUE);
        let ready = there.is_some_and(|vring| vring.get_ref().get_queue().ready());
        if ready && inner.device.negotiated().is_some() && !faults.is_empty() {
            inner.serve(EVENT_QUEUE, vrings, |device, queue, memory| {
                device.faults(queue, memory, &std::mem::take(&mut faults))
            });
        }
        inner.lost += faults.len() as u64;
    }

    fn stopped(&self, _queue: u16) {}

    fn reset(&self) {
        self.lock().reset();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ioas::{AttachError, Cause, DetachError, DomainIds, Ioas};
    use iommu::{DeviceId, RunMap, SoftwareUnit};
    use iopt::{FormatId, HeapTables};
    use virtio_iommu::wire::{Attach, MOST_REQUEST_BYTES, Request};
    use virtio_iommu::{EndpointConfig, Units, VirtioIommuConfig};
    use vm_memory::{Bytes as _, GuestAddress};

    use super::*;

    const DESCRIPTORS: u64 = 0x1000;
    const AVAILABLE: u64 = 0x2000;
    const USED: u64 = 0x3000;
    const BUFFERS: u64 = 0x4000;
    const SIZE: u16 = 8;
    const WRITABLE: u16 = 2;
    const NEXT: u16 = 1;

    /// Its units, and how often a queue was broken.
    struct Host(Units<Arc<HeapTables>>, usize);

    impl Domains for Host {
        fn space(&mut self) -> Result<Ioas, Cause> {
            self.0.space()
        }

        fn attach(&mut self, id: u32, space: &Ioas) -> Result<(), AttachError> {
            self.0.attach(id, space)
        }

        fn detach(&mut self, id: u32, space: &Ioas) -> Result<(), DetachError> {
            self.0.detach(id, space)
        }
    }

    impl IommuHost for Host {
        fn regions(&mut self, _memory: &GuestMemoryMmap) -> io::Result<Vec<MemoryRegion>> {
            Ok(Vec::new())
        }

        fn broken(&mut self, _error: &RingError) {
            self.1 += 1;
        }
    }

    const FAULT: FaultReport = FaultReport {
        reason: virtio_iommu::ReportReason::Mapping,
        endpoint: 1,
        access: None,
        address: None,
    };

    /// A device with two endpoints.
    fn device() -> Iommu<Host> {
        let tables = Arc::new(HeapTables::with_tables(64).unwrap());
        let data = RunMap::<Vec<std::sync::atomic::AtomicU64>>::new([]).unwrap();
        let unit = Arc::new(SoftwareUnit::new(tables.clone(), data));
        let mut units = Units::new(tables, DomainIds::new(16), [FormatId::VtdSs]);
        for id in [1, 2] {
            units.insert(id, unit.clone(), DeviceId(id));
        }
        let config = VirtioIommuConfig {
            input: Some(0..=(1 << 48) - 1),
            endpoints: vec![EndpointConfig::new(1), EndpointConfig::new(2)],
            ..VirtioIommuConfig::default()
        };
        Iommu::new(VirtioIommu::new(config, Host(units, 0)).unwrap())
    }

    /// The queue of requests of a driver, which stands at `next`.
    fn ring(memory: &BackendMemory, next: u16) -> Vring {
        let vring = Vring::new(memory.clone(), SIZE).unwrap();
        vring.set_queue_info(DESCRIPTORS, AVAILABLE, USED).unwrap();
        vring.set_queue_size(SIZE);
        vring.set_queue_next_avail(next);
        vring.set_queue_next_used(next);
        vring.set_queue_ready(true);
        vring
    }

    /// The driver attaches an endpoint to the domain of the same number, and notifies the device.
    fn attach(iommu: &Iommu<Host>, memory: &BackendMemory, vring: &Vring, endpoint: u32) {
        let guest = memory.memory();
        let domain = endpoint;
        let request = Request::Attach(Attach {
            domain,
            endpoint,
            ..Attach::default()
        });
        let mut bytes = [0; MOST_REQUEST_BYTES];
        let request = request.encode(&mut bytes);
        guest.write_slice(request, GuestAddress(BUFFERS)).unwrap();
        let answer = BUFFERS + request.len() as u64;
        let parts = [(BUFFERS, request.len() as u32, NEXT), (answer, 4, WRITABLE)];
        for (nth, (address, len, flags)) in (0..).zip(parts) {
            let at = |field: u64| GuestAddress(DESCRIPTORS + 16 * nth + field);
            guest.write_obj(address, at(0)).unwrap();
            guest.write_obj(len, at(8)).unwrap();
            guest.write_obj(flags, at(12)).unwrap();
            guest.write_obj(1u16, at(14)).unwrap();
        }
        let next = vring.get_ref().get_queue().next_avail();
        let slot = AVAILABLE + 4 + u64::from(next % SIZE) * 2;
        guest.write_obj(0u16, GuestAddress(slot)).unwrap();
        guest
            .write_obj(next + 1, GuestAddress(AVAILABLE + 2))
            .unwrap();
        iommu.kicked(REQUEST_QUEUE as u16, std::slice::from_ref(vring));
        let status: u8 = guest.read_obj(GuestAddress(answer)).unwrap();
        assert_eq!(status, 0);
    }

    fn domains(iommu: &Iommu<Host>) -> Vec<u32> {
        iommu.with(|device| device.domains().collect())
    }

    #[test]
    fn what_a_driver_did_is_gone_with_it_and_stays_over_a_pause() {
        let guest = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
        let memory = BackendMemory::new(guest);
        let iommu = device();
        iommu.memory(&memory).unwrap();
        let features = iommu.features();
        assert_eq!(features & VERSION_1, VERSION_1);

        iommu.negotiated(features);
        attach(&iommu, &memory, &ring(&memory, 0), 1);
        assert_eq!(domains(&iommu), [1]);

        // The machine was paused: the ring goes on.
        iommu.negotiated(features);
        attach(&iommu, &memory, &ring(&memory, 1), 2);
        assert_eq!(domains(&iommu), [1, 2]);

        // Another driver, without a reset message before.
        iommu.negotiated(features);
        attach(&iommu, &memory, &ring(&memory, 0), 2);
        assert_eq!(domains(&iommu), [2]);

        iommu.reset();
        assert_eq!(domains(&iommu), [0; 0]);
    }

    #[test]
    fn faults_wait_and_are_counted_beyond_what_can() {
        let iommu = device();
        iommu.report(std::iter::repeat_n(FAULT, MOST_FAULTS + 2));
        assert_eq!(iommu.lost(), 2);
    }

    #[test]
    fn faults_without_a_driver_are_counted_without_a_device() {
        let guest = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
        let memory = BackendMemory::new(guest);
        let iommu = device();
        let vrings = [ring(&memory, 0), ring(&memory, 0)];
        // Without memory, without features, with a queue that is not ready, over a reset.
        let mut lost = 0;
        let mut report_and_wake = || {
            iommu.report([FAULT]);
            iommu.woken(&vrings);
            lost += 1;
            assert_eq!(iommu.lost(), lost);
        };
        report_and_wake();
        iommu.memory(&memory).unwrap();
        report_and_wake();
        iommu.negotiated(iommu.features());
        vrings[EVENT_QUEUE].set_queue_ready(false);
        report_and_wake();
        vrings[EVENT_QUEUE].set_queue_ready(true);
        iommu.report([FAULT]);
        iommu.reset();
        assert_eq!(iommu.lost(), lost + 1);
        assert_eq!(iommu.with(|device| device.back_end().1), 0);
        // With a driver that has no buffer it is the device that counts.
        iommu.negotiated(iommu.features());
        iommu.report([FAULT]);
        iommu.woken(&vrings);
        assert_eq!(iommu.lost(), lost + 1);
        assert_eq!(iommu.with(|device| device.counters().dropped), 1);
        assert_eq!(iommu.with(|device| device.back_end().1), 0);
    }
}
