//! The crate `virtio-balloon`'s driver inside a Linux kernel.
//!
//! `balloon.c` is the kernel's half: it registers a virtio driver, owns the balloon's lock, its work items and the
//! guest's pages. This half implements the driver's seams by the functions of `balloon.h`, and is called by those
//! of its first section. There is no allocator, and no code of a standard library but `core`.
//!
//! Linux's virtio core keeps the rings ([`Queues`]); pages that may migrate are listed by Linux's `mm/balloon.c`, so
//! that the kernel chooses which leave ([`GuestPages::choose`]).

#![no_std]
#![deny(unsafe_op_in_unsafe_fn)]

use core::ffi::{c_int, c_void};
use core::fmt::{self, Write as _};
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicU16, Ordering, fence};
use core::time::Duration;
use core::{mem, ptr, slice};

use runs::{GuestAddr, Span};
use virtio_balloon::driver::{
    BufferMemory, DriverError, DriverSettings, Element, GuestPages, QueueAddresses, Queues,
    TargetProgress, Transport,
};
use virtio_balloon::{
    BULK_CONFIG_BYTES, BalloonConfig, BalloonDriver, BulkBit, Features, GuestPage, Numbering,
    Stats, Tag, Wait,
};

/// `struct balloon`.
enum Opaque {}

/// `struct dmaspace_run`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CRun {
    address: u64,
    bytes: u64,
}

type Leaves = unsafe extern "C" fn(*mut c_void, u64, u64) -> bool;

// As in balloon.h.
unsafe extern "C" {
    fn dmaspace_reset(balloon: *mut Opaque) -> c_int;
    fn dmaspace_features(balloon: *mut Opaque) -> u64;
    fn dmaspace_accept(balloon: *mut Opaque, features: u64) -> c_int;
    fn dmaspace_begin(balloon: *mut Opaque);
    fn dmaspace_broken(balloon: *mut Opaque) -> bool;
    fn dmaspace_read_config(balloon: *mut Opaque, offset: u16, bytes: *mut u8, count: usize);
    fn dmaspace_write_config(balloon: *mut Opaque, offset: u16, value: u32);
    fn dmaspace_generation(balloon: *mut Opaque) -> u32;
    fn dmaspace_queue_size(balloon: *mut Opaque, queue: u16) -> u16;
    fn dmaspace_offer(
        balloon: *mut Opaque,
        queue: u16,
        runs: *const CRun,
        count: usize,
        write: bool,
    ) -> c_int;
    fn dmaspace_answered(balloon: *mut Opaque, queue: u16) -> bool;
    fn dmaspace_wait(balloon: *mut Opaque, queue: u16, ns: u64) -> c_int;
    fn dmaspace_now() -> u64;
    fn dmaspace_pause(ns: u64);
    fn dmaspace_allocate(bytes: usize) -> *mut c_void;
    fn dmaspace_free(memory: *mut c_void, bytes: usize);
    fn dmaspace_allocate_shared(bytes: usize) -> u64;
    fn dmaspace_free_shared(address: u64, bytes: usize);
    fn dmaspace_pointer(address: u64) -> *mut u8;
    fn dmaspace_page_shift() -> u32;
    fn dmaspace_block() -> u64;
    fn dmaspace_span(balloon: *mut Opaque, span: *mut CRun);
    fn dmaspace_take(balloon: *mut Opaque, bytes: u64, address: *mut u64) -> bool;
    fn dmaspace_give_back(balloon: *mut Opaque, address: u64, bytes: u64);
    fn dmaspace_choose(balloon: *mut Opaque, bytes: u64, leaves: Leaves, context: *mut c_void);
    fn dmaspace_stay(balloon: *mut Opaque, address: u64, bytes: u64);
    fn dmaspace_counted(balloon: *mut Opaque, address: u64, bytes: u64, held: bool, managed: bool);
    fn dmaspace_stats(balloon: *mut Opaque, values: *mut u64) -> u32;
    fn dmaspace_error(balloon: *mut Opaque, text: *const u8, bytes: usize);
    fn dmaspace_panic() -> !;
}

/// The most elements of a buffer: those of a report of free pages.
const ELEMENTS: usize = 32;
/// How long the device has for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes taken before a message to the host: the lock is held for so long.
const ROUND: u64 = 1 << 30;

const STARVED: c_int = 1;
const EIO: c_int = 5;
const EAGAIN: c_int = 11;
const ENOMEM: c_int = 12;
const ENODEV: c_int = 19;
const EINVAL: c_int = 22;
const ETIMEDOUT: c_int = 110;

/// An error number of the kernel, negative.
#[derive(Clone, Copy, Debug)]
struct Errno(c_int);

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error {}", self.0)
    }
}

fn checked(code: c_int) -> Result<c_int, Errno> {
    if code < 0 { Err(Errno(code)) } else { Ok(code) }
}

/// The balloon, as `balloon.c` knows it. It outlives the driver.
#[derive(Clone, Copy, Debug)]
struct Kernel(*mut Opaque);

type Balloon = BalloonDriver<Kernel, Kernel, Kernel>;
type BalloonError = DriverError<Errno>;

// SAFETY, of all calls into balloon.c in these impls: `Kernel` is made in `dmaspace_balloon_new` alone, of the
// balloon that balloon.c gave, which it frees only after it has dropped the driver. Pointers that are handed over
// are those of live values of the stated size, and balloon.c does not keep them.

impl Transport for Kernel {
    type Error = Errno;

    fn reset(&mut self) -> Result<(), Errno> {
        // SAFETY: as above.
        checked(unsafe { dmaspace_reset(self.0) }).map(|_| ())
    }

    fn offered(&mut self) -> Result<Features, Errno> {
        // SAFETY: as above.
        Ok(Features(unsafe { dmaspace_features(self.0) }))
    }

    fn accept(&mut self, features: Features) -> Result<bool, Errno> {
        // SAFETY: as above.
        Ok(checked(unsafe { dmaspace_accept(self.0, features.0) })? > 0)
    }

    fn begin(&mut self) -> Result<(), Errno> {
        // SAFETY: as above.
        unsafe { dmaspace_begin(self.0) };
        Ok(())
    }

    fn broken(&mut self) -> Result<bool, Errno> {
        // SAFETY: as above.
        Ok(unsafe { dmaspace_broken(self.0) })
    }

    fn read_config(&mut self, offset: u16, bytes: &mut [u8]) -> Result<(), Errno> {
        // SAFETY: as above.
        unsafe { dmaspace_read_config(self.0, offset, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn generation(&mut self) -> Result<u32, Errno> {
        // SAFETY: as above.
        Ok(unsafe { dmaspace_generation(self.0) })
    }

    fn write_config(&mut self, offset: u16, value: u32) -> Result<(), Errno> {
        // SAFETY: as above.
        unsafe { dmaspace_write_config(self.0, offset, value) };
        Ok(())
    }

    fn queue_size(&mut self, queue: u16) -> Result<u16, Errno> {
        // SAFETY: as above.
        Ok(unsafe { dmaspace_queue_size(self.0, queue) })
    }

    fn queues(&mut self) -> Option<&mut dyn Queues<Error = Errno>> {
        Some(self)
    }

    fn enable_queue(&mut self, _queue: u16, _size: u16, _at: QueueAddresses) -> Result<(), Errno> {
        Err(Errno(-EINVAL))
    }

    fn notify(&mut self, _queue: u16) -> Result<(), Errno> {
        Err(Errno(-EINVAL))
    }

    fn wait(&mut self, queue: u16, most: Duration) -> Result<(), Errno> {
        let ns = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: as above.
        checked(unsafe { dmaspace_wait(self.0, queue, ns) }).map(|_| ())
    }

    fn now(&mut self) -> Duration {
        // SAFETY: as above.
        Duration::from_nanos(unsafe { dmaspace_now() })
    }

    fn pause(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: as above.
        unsafe { dmaspace_pause(ns) };
    }
}

impl Queues for Kernel {
    type Error = Errno;

    fn offer(&mut self, queue: u16, buffer: &[Element]) -> Result<(), Errno> {
        let mut runs = [CRun::default(); ELEMENTS];
        // Elements that the device writes go alone: no buffer of the balloon has both.
        let write = buffer.first().is_some_and(|element| element.write);
        if buffer.len() > ELEMENTS || buffer.iter().any(|element| element.write != write) {
            return Err(Errno(-EINVAL));
        }
        for (run, element) in runs.iter_mut().zip(buffer) {
            (run.address, run.bytes) = (element.address, element.len.into());
        }
        let count = buffer.len();
        // SAFETY: as above.
        checked(unsafe { dmaspace_offer(self.0, queue, runs.as_ptr(), count, write) }).map(|_| ())
    }

    fn answered(&mut self, queue: u16) -> Result<bool, Errno> {
        // SAFETY: as above.
        Ok(unsafe { dmaspace_answered(self.0, queue) })
    }
}

/// Memory that only the driver sees: words, or bytes.
#[derive(Debug)]
struct Owned<V> {
    first: ptr::NonNull<V>,
    count: usize,
}

impl<V> Owned<V> {
    fn new(count: usize) -> Option<Self> {
        let bytes = count
            .checked_mul(size_of::<V>())
            .filter(|bytes| *bytes > 0)?;
        // SAFETY: as above. The memory is all 0, aligned for any integer.
        let first = ptr::NonNull::new(unsafe { dmaspace_allocate(bytes) }.cast())?;
        Some(Self { first, count })
    }
}

impl<V> Drop for Owned<V> {
    fn drop(&mut self) {
        // SAFETY: as above; it was allocated so long in `new`, and nothing else has it.
        unsafe { dmaspace_free(self.first.as_ptr().cast(), self.count * size_of::<V>()) };
    }
}

macro_rules! owned {
    ($($integer:ty),*) => {$(
        impl AsRef<[$integer]> for Owned<$integer> {
            fn as_ref(&self) -> &[$integer] {
                // SAFETY: `new` allocated so many, all 0, and they live until `self` is dropped.
                unsafe { slice::from_raw_parts(self.first.as_ptr(), self.count) }
            }
        }

        impl AsMut<[$integer]> for Owned<$integer> {
            fn as_mut(&mut self) -> &mut [$integer] {
                // SAFETY: as in `as_ref`; `self` is borrowed for as long.
                unsafe { slice::from_raw_parts_mut(self.first.as_ptr(), self.count) }
            }
        }
    )*};
}

owned!(u64, u8);

impl BufferMemory for Kernel {
    type Error = Errno;
    type Words = Owned<u64>;
    type Bytes = Owned<u8>;

    fn words(&mut self, count: usize) -> Option<Owned<u64>> {
        Owned::new(count)
    }

    fn bytes(&mut self, count: usize) -> Option<Owned<u8>> {
        Owned::new(count)
    }

    fn allocate(&mut self, len: u64) -> Option<u64> {
        // SAFETY: as above.
        let address = unsafe { dmaspace_allocate_shared(len as usize) };
        (address != 0).then_some(address)
    }

    fn free(&mut self, memory: Span<GuestAddr>) {
        // SAFETY: as above; the driver gives back what `allocate` gave.
        unsafe { dmaspace_free_shared(memory.start, memory.len as usize) };
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Errno> {
        // SAFETY: the driver reads within what `allocate` gave. The device may write it meanwhile: bytes are
        // copied, and whatever they are is checked by the driver.
        unsafe {
            ptr::copy_nonoverlapping(dmaspace_pointer(address), bytes.as_mut_ptr(), bytes.len());
        }
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Errno> {
        // SAFETY: the driver writes within what `allocate` gave.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), dmaspace_pointer(address), bytes.len());
        }
        Ok(())
    }

    fn load(&self, address: u64) -> Result<u16, Errno> {
        // SAFETY: within what `allocate` gave, and aligned: fields of a ring.
        let word = unsafe { AtomicU16::from_ptr(dmaspace_pointer(address).cast()) };
        Ok(u16::from_le(word.load(Ordering::Acquire)))
    }

    fn store(&self, address: u64, value: u16) -> Result<(), Errno> {
        // SAFETY: as in `load`.
        let word = unsafe { AtomicU16::from_ptr(dmaspace_pointer(address).cast()) };
        word.store(value.to_le(), Ordering::Release);
        Ok(())
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

fn guest_page(shift: u32) -> GuestPage {
    match shift {
        14 => GuestPage::SIZE_16K,
        16 => GuestPage::SIZE_64K,
        _ => GuestPage::SIZE_4K,
    }
}

impl GuestPages for Kernel {
    fn page(&self) -> GuestPage {
        // SAFETY: as above.
        guest_page(unsafe { dmaspace_page_shift() })
    }

    fn span(&self) -> Span<GuestAddr> {
        let mut span = CRun::default();
        // SAFETY: as above.
        unsafe { dmaspace_span(self.0, &mut span) };
        Span::new(span.address, span.bytes)
    }

    fn take(&mut self, bytes: u64) -> Option<u64> {
        let mut address = 0;
        // SAFETY: as above.
        unsafe { dmaspace_take(self.0, bytes, &mut address) }.then_some(address)
    }

    fn give_back(&mut self, run: Span<GuestAddr>) {
        // SAFETY: as above; the driver gives back what it took.
        unsafe { dmaspace_give_back(self.0, run.start, run.len) };
    }

    fn choose(&mut self, bytes: u64, leaves: &mut dyn FnMut(Span<GuestAddr>) -> bool) -> bool {
        unsafe extern "C" fn call(context: *mut c_void, address: u64, bytes: u64) -> bool {
            // SAFETY: the context is the closure below, which lives until dmaspace_choose returns, and nothing
            // else calls it meanwhile.
            let leaves = unsafe { &mut *context.cast::<&mut dyn FnMut(Span<GuestAddr>) -> bool>() };
            leaves(Span::new(address, bytes))
        }
        let mut leaves = leaves;
        let context = (&raw mut leaves).cast();
        // SAFETY: as above, and as `call` says.
        unsafe { dmaspace_choose(self.0, bytes, call, context) };
        true
    }

    fn stay(&mut self, run: Span<GuestAddr>) {
        // SAFETY: as above.
        unsafe { dmaspace_stay(self.0, run.start, run.len) };
    }

    fn counted(&mut self, run: Span<GuestAddr>, held: bool, managed: bool) {
        // SAFETY: as above.
        unsafe { dmaspace_counted(self.0, run.start, run.len, held, managed) };
    }

    fn stats(&mut self) -> Stats {
        let mut values = [0; Tag::ALL.len()];
        // SAFETY: as above: there is room for each tag.
        let known = unsafe { dmaspace_stats(self.0, values.as_mut_ptr()) };
        let mut stats = Stats::default();
        for (tag, value) in Tag::ALL.into_iter().zip(values) {
            if known & 1 << tag.number() != 0 {
                stats.set(tag, value);
            }
        }
        stats
    }
}

/// A line of the kernel's log; what does not fit is left out.
struct Line {
    text: [u8; 200],
    len: usize,
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.text.get_mut(self.len..).unwrap_or_default();
        for (place, byte) in room.iter_mut().zip(text.bytes()) {
            *place = byte;
            self.len += 1;
        }
        Ok(())
    }
}

/// Error number for the kernel. Errors that no retry mends are logged.
fn errno(kernel: Kernel, error: &BalloonError) -> c_int {
    let code = match error {
        DriverError::Busy | DriverError::Frozen => return -EAGAIN,
        DriverError::Seam(Errno(code)) => *code,
        DriverError::Broken => -ENODEV,
        DriverError::NoMemory { .. } => -ENOMEM,
        DriverError::Silent { .. } => -ETIMEDOUT,
        DriverError::Features { .. }
        | DriverError::NotNegotiated { .. }
        | DriverError::NotHeld { .. } => -EINVAL,
        _ => -EIO,
    };
    let mut line = Line {
        text: [0; 200],
        len: 0,
    };
    // It takes everything.
    let _ = write!(line, "{error}");
    // SAFETY: as above.
    unsafe { dmaspace_error(kernel.0, line.text.as_ptr(), line.len) };
    code
}

/// The driver behind the kernel's pointer.
///
/// # Safety
///
/// `driver` is one that [`dmaspace_balloon_new`] made, which was not dropped, and the balloon's lock is held.
unsafe fn balloon<'a>(driver: *mut c_void) -> &'a mut Balloon {
    // SAFETY: as the caller promises.
    unsafe { &mut *driver.cast() }
}

fn result(driver: &mut Balloon, result: Result<c_int, BalloonError>) -> c_int {
    let kernel = *driver.transport();
    result.unwrap_or_else(|error| errno(kernel, &error))
}

fn bulk_bit(bit: c_int) -> Option<BulkBit> {
    u8::try_from(bit)
        .ok()
        .and_then(|bit| BulkBit::new(bit).ok())
}

/// True if this bit may stand for messages in bulk.
#[unsafe(no_mangle)]
pub extern "C" fn dmaspace_balloon_bit_is_free(bit: c_int) -> bool {
    bulk_bit(bit).is_some()
}

/// True if messages in bulk, as this configuration space describes them, are known here.
///
/// # Safety
///
/// `config` has [`BULK_CONFIG_BYTES`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_balloon_takes_bulk(config: *const u8) -> bool {
    // SAFETY: as the caller promises.
    let bytes = unsafe { &*config.cast::<[u8; BULK_CONFIG_BYTES]>() };
    BalloonConfig::from_bytes(bytes).has_bulk()
}

/// Bytes of the driver.
#[unsafe(no_mangle)]
pub extern "C" fn dmaspace_balloon_size() -> usize {
    size_of::<Balloon>()
}

/// Makes the driver at `driver`, and lets it begin.
///
/// # Safety
///
/// There are [`dmaspace_balloon_size`] bytes, aligned to 8, and `kernel` outlives the driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_balloon_new(
    driver: *mut c_void,
    kernel: *mut c_void,
    bulk: c_int,
    poison: i64,
) -> c_int {
    let kernel = Kernel(kernel.cast());
    // SAFETY: it reads a constant of the kernel.
    let block = unsafe { dmaspace_block() };
    let settings = DriverSettings {
        bulk: bulk_bit(bulk),
        numbering: Numbering::Compressed,
        wait: Wait::Sleep { most: PATIENCE },
        round: ROUND,
        block,
        hint_block: block,
        // The work item tries again, and does not hold the lock meanwhile.
        tries: 0,
        poison: u32::try_from(poison).ok(),
        ..DriverSettings::default()
    };
    // It lies on the stack only until it is made, and not below what it does then.
    if let Err(error) = place(driver.cast(), kernel, settings) {
        return errno(kernel, &error);
    }
    // SAFETY: it was made.
    let made = unsafe { &mut *driver.cast::<Balloon>() };
    let started = made.restore();
    if let Err(error) = started {
        // SAFETY: it was made, and is not used again.
        unsafe { ptr::drop_in_place(made) };
        return errno(kernel, &error);
    }
    0
}

#[inline(never)]
fn place(
    driver: *mut Balloon,
    kernel: Kernel,
    settings: DriverSettings,
) -> Result<(), BalloonError> {
    let made = BalloonDriver::frozen(kernel, kernel, kernel, settings)?;
    // SAFETY: as the caller of `dmaspace_balloon_new` promises.
    unsafe { driver.write(made) };
    Ok(())
}

/// Drops a driver that is frozen.
///
/// # Safety
///
/// As [`balloon`]; it is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_balloon_drop(driver: *mut c_void) {
    // SAFETY: as the caller promises.
    unsafe { ptr::drop_in_place(driver.cast::<Balloon>()) };
}

/// The functions that need nothing but the driver: each with its name in C, and what it does.
macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident($driver:ident $(, $argument:ident: $kind:ty)*) -> $value:ty { $body:expr })*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        ///
        /// As [`balloon`].
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(driver: *mut c_void $(, $argument: $kind)*) -> $value {
            // SAFETY: as the caller promises.
            let $driver = unsafe { balloon(driver) };
            $body
        }
    )*};
}

calls! {
    /// Takes over the device anew.
    dmaspace_balloon_restore(driver) -> c_int {{
        let restored = driver.restore().map(|()| 0);
        result(driver, restored)
    }}

    /// Gives all pages back, and resets the device.
    dmaspace_balloon_freeze(driver) -> c_int {{
        let frozen = driver.freeze().map(|()| 0);
        result(driver, frozen)
    }}

    /// Brings the balloon to what the device wants, or as near as there are pages.
    dmaspace_balloon_follow(driver) -> c_int {{
        let followed = driver.follow().map(|progress| match progress {
            TargetProgress::Reached => 0,
            TargetProgress::Starved { .. } => STARVED,
        });
        result(driver, followed)
    }}

    /// Gives back pages, since memory is short. Returns the bytes.
    dmaspace_balloon_out_of_memory(driver) -> i64 {
        match driver.out_of_memory() {
            Ok(bytes) => bytes as i64,
            Err(error) => errno(*driver.transport(), &error).into(),
        }
    }

    /// A page that is held changes places with another one. -EAGAIN: nothing has changed. Otherwise both are held.
    dmaspace_balloon_migrate(driver, old: u64, new: u64) -> c_int {{
        let migrated = driver.migrate(old, new).map(|()| 0);
        if let Err(DriverError::NotHeld { .. } | DriverError::BadBlock { .. }) = migrated {
            return -EAGAIN;
        }
        // Busy before any message is -EAGAIN; a message without an answer is not.
        match migrated {
            Err(DriverError::Seam(Errno(code))) if code == -EAGAIN => -EIO,
            migrated => result(driver, migrated),
        }
    }}

    /// Answers the device's question for statistics, if there is one.
    dmaspace_balloon_stats(driver) -> c_int {{
        let answered = driver.answer_stats().map(|_| 0);
        result(driver, answered)
    }}

    /// Does what the device wants of free page hinting.
    dmaspace_balloon_hint(driver) -> c_int {{
        let hinted = driver.hint().map(|_| 0);
        result(driver, hinted)
    }}

    /// Gives back pages that were hinted. Returns the bytes.
    dmaspace_balloon_give_back_hinted(driver, bytes: u64) -> u64 {
        driver.give_back_hinted(bytes)
    }

    /// Bytes in the balloon.
    dmaspace_balloon_held(driver) -> u64 {
        driver.held()
    }
}

/// Reports free pages, which the kernel keeps from everything until this returns. The device may discard them until
/// it has answered, so this returns only then, or when the device is gone.
///
/// # Safety
///
/// As [`balloon`]; there are `count` runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dmaspace_balloon_report(
    driver: *mut c_void,
    runs: *const c_void,
    count: usize,
) -> c_int {
    // SAFETY: as the caller promises.
    let driver = unsafe { balloon(driver) };
    // SAFETY: as the caller promises.
    let runs = unsafe { slice::from_raw_parts(runs.cast::<CRun>(), count.min(ELEMENTS)) };
    let mut blocks = [Span::default(); ELEMENTS];
    for (block, run) in blocks.iter_mut().zip(runs) {
        *block = Span::new(run.address, run.bytes);
    }
    let (blocks, _) = blocks.split_at(runs.len());
    let mut with_device = false;
    loop {
        match driver.report(blocks) {
            Err(DriverError::Silent { .. }) => with_device = true,
            Err(DriverError::Busy) if with_device => {
                driver.transport().pause(Duration::from_millis(10))
            }
            reported => return result(driver, reported.map(|_| 0)),
        }
    }
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    // SAFETY: it takes nothing.
    unsafe { dmaspace_panic() }
}

// balloon.h has it as a number.
const _: () = assert!(BULK_CONFIG_BYTES == 24 && mem::align_of::<Balloon>() <= 8);
