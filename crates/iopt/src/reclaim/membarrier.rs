//! Linux's `membarrier(2)`: a barrier on every processor that runs a thread of this process.

/// Announces that this process will [`execute`] barriers. False when the system has none, or refuses it.
pub(super) fn register() -> bool {
    call(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)
}

/// Has every thread of the process execute a full barrier, between two instructions of its own, before
/// this returns. False when the system refuses it.
pub(super) fn execute() -> bool {
    // A child of `fork` registers anew if its system does not inherit it.
    call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
        || register() && call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
}

fn call(command: libc::c_int) -> bool {
    // SAFETY: the call takes numbers only, and changes nothing that the program can see.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}
