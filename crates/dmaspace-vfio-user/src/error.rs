//! Reasons of refused requests, and of ended connections.

use std::io;

use iommu::FlushError;
use runs::{Iova, Span};
use rustix::io::Errno;

/// Refusal of a request: nothing has changed, and the connection goes on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestRefusal {
    /// A command that is not served.
    #[error("command {command} is not served")]
    Command {
        /// Its number.
        command: u16,
    },
    /// A reply, where only commands are expected.
    #[error("a reply to command {command}, which was not sent")]
    Reply {
        /// Its number.
        command: u16,
    },
    /// A second `VFIO_USER_VERSION`.
    #[error("the version is agreed on already")]
    VersionTwice,
    /// The payload has another length.
    #[error("a payload of {given} bytes where {needed} are needed")]
    Payload {
        /// Bytes that came.
        given: usize,
        /// Bytes that it must have, or begin with.
        needed: usize,
    },
    /// `argsz` does not fit.
    #[error("argsz is {argsz}, and {needed} bytes are needed")]
    ArgumentSize {
        /// As it came.
        argsz: u32,
        /// The least.
        needed: u32,
    },
    /// Another number of file descriptors.
    #[error("{given} file descriptors came, {expected} are expected at most")]
    Descriptors {
        /// Number received.
        given: usize,
        /// Largest number.
        expected: usize,
    },
    /// Flags that are not known, or contradict each other.
    #[error("flags {flags:#x} are unknown or contradict each other")]
    Flags {
        /// As they came.
        flags: u32,
    },
    /// No such region.
    #[error("there is no region {index}")]
    Region {
        /// Its number.
        index: u32,
    },
    /// An access outside its region, or of more bytes than a message may move.
    #[error("{count} bytes at {offset:#x} of region {region}, which has {size:#x}")]
    Access {
        /// The region.
        region: u32,
        /// Start, bytes.
        offset: u64,
        /// Bytes.
        count: u64,
        /// The region's length, bytes.
        size: u64,
    },
    /// The device model refuses an access.
    #[error("the device refuses the access")]
    Device(#[source] io::Error),
    /// No such interrupts.
    #[error("interrupts {start} to {start} + {count} of index {index}, which has {there}")]
    Interrupts {
        /// The index.
        index: u32,
        /// The first.
        start: u32,
        /// Number given.
        count: u32,
        /// Number there is.
        there: u32,
    },
    /// An interrupt that cannot be masked.
    #[error("interrupts of index {index} cannot be masked")]
    NotMaskable {
        /// The index.
        index: u32,
    },
    /// The file descriptor for an interrupt is no eventfd.
    #[error("the file descriptor for interrupt {vector} is no eventfd")]
    NotEventFd {
        /// The interrupt.
        vector: u32,
    },
    /// Memory cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapRefusal),
    /// Memory cannot be unmapped.
    #[error(transparent)]
    Unmap(#[from] UnmapRefusal),
    /// Dirty tracking failed: to start it, or to report dirty pages.
    #[error(transparent)]
    Dirty(#[from] DirtyRefusal),
    /// A feature that is not there, or not for this method.
    #[error("feature {feature} is not supported, or not with the flags {flags:#x}")]
    Feature {
        /// Its index.
        feature: u16,
        /// The request's flags.
        flags: u32,
    },
    /// The device cannot be migrated.
    #[error("the device has no migration")]
    NoMigration,
    /// No such state of migration, or none that can be reached from here.
    #[error("no way from the migration state {from} to {to}")]
    MigrationState {
        /// The state, as the specification counts them.
        from: u32,
        /// The one that was asked for.
        to: u32,
    },
    /// Migration data in another state than that for it.
    #[error("no migration data in the state {state}")]
    MigrationData {
        /// The state, as the specification counts them.
        state: u32,
    },
    /// The device's state is longer than allowed.
    #[error("{bytes} bytes of migration data, {most} are allowed")]
    MigrationLength {
        /// Bytes.
        bytes: usize,
        /// The most.
        most: usize,
    },
    /// The device refuses the state that it was given.
    #[error("the device does not resume")]
    MigrationLoad(#[source] io::Error),
}

impl RequestRefusal {
    /// Value of the reply's error field.
    pub(crate) const fn errno(&self) -> u32 {
        let errno = match self {
            Self::Map(MapRefusal::Exists { .. }) => Errno::EXIST,
            Self::Map(MapRefusal::TooMany { .. } | MapRefusal::TooManyFiles { .. }) => Errno::NOSPC,
            Self::Map(MapRefusal::TooLong { .. } | MapRefusal::NoWindow { .. }) => Errno::NOSPC,
            Self::Map(MapRefusal::File { .. } | MapRefusal::Space(_)) => Errno::NOMEM,
            Self::Unmap(UnmapRefusal::InUse { .. } | UnmapRefusal::Space(_)) => Errno::BUSY,
            Self::Feature { .. } | Self::NoMigration => Errno::NOTSUP,
            Self::Device(_) => Errno::IO,
            _ => Errno::INVAL,
        };
        errno.raw_os_error() as u32
    }
}

/// Failure to map memory of the client.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapRefusal {
    /// Flags other than readable and writeable, or none.
    #[error("flags {flags:#x} permit nothing, or are unknown")]
    Flags {
        /// As they came.
        flags: u32,
    },
    /// The addresses, the offset or the size are no multiples of 4 KiB, the size is 0, or the end lies beyond 2^64.
    #[error("{size:#x} bytes at {iova:#x}, offset {offset:#x}: no whole pages, or beyond 2^64")]
    Range {
        /// Device address.
        iova: u64,
        /// Bytes.
        size: u64,
        /// In the file, bytes.
        offset: u64,
    },
    /// There is a map already.
    #[error("{wanted} overlaps the map {there}")]
    Exists {
        /// The requested range.
        wanted: Span<Iova>,
        /// The first map that is in the way.
        there: Span<Iova>,
    },
    /// As many maps as there can be.
    #[error("there are {most} maps, as many as there can be")]
    TooMany {
        /// The limit.
        most: usize,
    },
    /// As many files as there can be.
    #[error("there are {most} memory files, as many as there can be")]
    TooManyFiles {
        /// The limit.
        most: usize,
    },
    /// The file is none of memory.
    #[error("the file descriptor is no memory file, but {kind}")]
    NotMemory {
        /// Kind of the file.
        kind: &'static str,
    },
    /// The client could make the file shorter, or it is of huge pages of which none may be left, and the program has not asked for
    /// [`ShrinkWatch`](hostmem::ShrinkWatch).
    #[error(
        "pages of the memory file may go missing, and the program does not watch for that (ShrinkWatch::install)"
    )]
    CanShrink,
    /// The map reaches over the end of its file.
    #[error("{size:#x} bytes at offset {offset:#x} of a file of {file:#x}")]
    BeyondFile {
        /// Bytes.
        size: u64,
        /// Start in the file, bytes.
        offset: u64,
        /// Whole pages of the file, bytes.
        file: u64,
    },
    /// The files of the client are longer than allowed.
    #[error("memory files of {wanted:#x} bytes together, {most:#x} are allowed")]
    TooLong {
        /// With this one, bytes.
        wanted: u64,
        /// The limit, bytes.
        most: u64,
    },
    /// There are no addresses left that stand for the file's bytes.
    #[error("no addresses are left for a file of {len:#x} bytes")]
    NoWindow {
        /// Bytes.
        len: u64,
    },
    /// The file cannot be looked at or mapped into this process.
    #[error("the memory file cannot be {step}")]
    File {
        /// The failed step.
        step: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The address space refuses: the tables are full, for instance.
    #[error(transparent)]
    Space(#[from] ioas::MapError),
}

/// Failure to unmap memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnmapRefusal {
    /// The size is 0, or the end lies beyond 2^64.
    #[error("{size:#x} bytes at {iova:#x}: none, or beyond 2^64")]
    Range {
        /// Device address.
        iova: u64,
        /// Bytes.
        size: u64,
    },
    /// Unknown flags, or addresses together with the flag that unmaps everything.
    #[error("flags {flags:#x} are unknown, or contradict {size:#x} bytes at {iova:#x}")]
    Flags {
        /// As they came.
        flags: u32,
        /// Device address.
        iova: u64,
        /// Bytes.
        size: u64,
    },
    /// The range cuts a map.
    #[error("{range} cuts the map {map}")]
    Cuts {
        /// The requested range.
        range: Span<Iova>,
        /// The first map that is cut.
        map: Span<Iova>,
    },
    /// Some code still uses a file's memory. No device can reach it by an address any more; it is unmapped from this process
    /// with the next unmap.
    #[error("the memory of an unmapped file was still in use after {waited_ms} ms")]
    InUse {
        /// Time waited, milliseconds.
        waited_ms: u64,
    },
    /// The address space refuses: an access that began before has not ended in time, for instance.
    #[error(transparent)]
    Space(#[from] ioas::UnmapError),
}

/// Failure to track or report written pages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirtyRefusal {
    /// No power of two, or less than 4 KiB.
    #[error("pages of {page:#x} bytes: no power of two from 4096 on")]
    Page {
        /// Bytes.
        page: u64,
    },
    /// More ranges than came.
    #[error("{ranges} ranges are announced, and {bytes} bytes follow")]
    Ranges {
        /// Number of ranges.
        ranges: u32,
        /// Bytes behind the number.
        bytes: usize,
    },
    /// It is not tracked.
    #[error("device writes are not tracked: DMA logging is off")]
    NotTracked,
    /// The bitmap has more bytes than a message may have, or stands for nothing.
    #[error("a bitmap for {len:#x} bytes at {iova:#x} in pages of {page:#x}: none, or too long")]
    Bitmap {
        /// Device address.
        iova: u64,
        /// Bytes.
        len: u64,
        /// Bytes of a page.
        page: u64,
    },
    /// Tracking does not begin.
    #[error(transparent)]
    Tracking(#[from] ioas::TrackingError),
    /// Tables cannot be harvested.
    #[error(transparent)]
    Harvest(#[from] ioas::HarvestError),
    /// The unit or a device model does not come to an end.
    #[error(transparent)]
    Flush(#[from] FlushError),
}

/// End of a connection for another reason than a client that left between two messages. All of its
/// memory is unmapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The listening socket fails.
    #[error("no client can be accepted")]
    Accept(#[source] io::Error),
    /// The socket fails, or the client has not taken a reply in time.
    #[error("the client cannot be reached")]
    Socket(#[source] io::Error),
    /// The client left in the middle of a message.
    #[error("the client left after {got} of {size} bytes of a message")]
    Cut {
        /// Bytes that came.
        got: usize,
        /// Bytes of the message, or of a header.
        size: usize,
    },
    /// No message has this size, so that it is not known where the next one begins.
    #[error("a message of {size} bytes: no message has this size")]
    Size {
        /// As the header has it.
        size: u32,
    },
    /// The first message is no version.
    #[error("the first message is command {command}, not the version")]
    NoVersion {
        /// Its number.
        command: u16,
    },
    /// The client proposes something else than version 0.
    #[error("the client speaks version {major}.{minor}")]
    Version {
        /// The major number.
        major: u16,
        /// The minor number.
        minor: u16,
    },
    /// The client's capabilities are no JSON of the expected form.
    #[error("the client's capabilities cannot be read: {0}")]
    Capabilities(String),
    /// The client has made a memory file shorter, and a device model has touched what is missing.
    #[error("the client has taken memory away: offset {offset:#x} of its file")]
    MemoryLost {
        /// In the file, bytes.
        offset: u64,
    },
    /// The client's memory could not be unmapped when it left.
    #[error("the memory of a client that has left cannot be unmapped")]
    Leave(#[source] UnmapRefusal),
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    /// Messages of an error and its causes, none of which has the next one within it.
    fn chain(error: &(dyn Error + 'static)) -> Vec<String> {
        let causes = core::iter::successors(Some(error), |&error| error.source());
        let said: Vec<_> = causes.map(ToString::to_string).collect();
        for pair in said.windows(2) {
            assert!(!pair[0].contains(&pair[1]), "{pair:?}");
        }
        said
    }

    #[test]
    fn each_cause_is_said_once() {
        let source = || io::Error::from_raw_os_error(12);
        let step = "mapped";
        let file = MapRefusal::File {
            step,
            source: source(),
        };
        assert_eq!(chain(&RequestRefusal::Map(file)).len(), 2);
        assert_eq!(chain(&RequestRefusal::Device(source())).len(), 2);
    }
}
