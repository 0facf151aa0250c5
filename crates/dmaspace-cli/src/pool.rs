//! Pools of huge pages: the lines of a shell that raise one.

/// The lines of a shell that raise the pool of this file: others may have pages of it.
pub(crate) fn raise(file: &str, pages: u64) -> [String; 2] {
    [
        format!("pool={file}"),
        format!("echo $(($(cat $pool) + {pages})) > $pool"),
    ]
}
