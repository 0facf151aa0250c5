//! Levels as types.

/// A level as a type, so that everything that depends on it is a constant.
pub(crate) trait Level {
    /// The level; 0 is that of the smallest page.
    const N: usize;
    /// The level below; of level 0 itself.
    type Below: Level;
}

pub(crate) struct L<const N: usize>;

macro_rules! levels {
    ($($n:literal => $below:literal),*) => {$(
        impl Level for L<$n> {
            const N: usize = $n;
            type Below = L<$below>;
        }
    )*};
}

levels!(0 => 0, 1 => 0, 2 => 1, 3 => 2, 4 => 3, 5 => 4);

/// Calls `$body` with `$root` as the root of a table that begins at `$begin`, a
/// [`Begin`](super::top::Begin), and `$level` as the type of its top level.
macro_rules! at_top {
    ($begin:expr, $format:ty, $level:ident, $root:ident => $body:expr) => {{
        use $crate::engine::L;
        let $crate::engine::top::Begin {
            root: $root,
            levels,
        } = $begin;
        // The guards are constants: levels that the format cannot have cost no code. The most
        // levels that it can have need no comparison.
        match levels {
            1 if <$format>::MIN_LEVELS <= 1 && <$format>::MAX_LEVELS > 1 => {
                type $level = L<0>;
                $body
            }
            2 if <$format>::MIN_LEVELS <= 2 && <$format>::MAX_LEVELS > 2 => {
                type $level = L<1>;
                $body
            }
            3 if <$format>::MIN_LEVELS <= 3 && <$format>::MAX_LEVELS > 3 => {
                type $level = L<2>;
                $body
            }
            4 if <$format>::MIN_LEVELS <= 4 && <$format>::MAX_LEVELS > 4 => {
                type $level = L<3>;
                $body
            }
            5 if <$format>::MIN_LEVELS <= 5 && <$format>::MAX_LEVELS > 5 => {
                type $level = L<4>;
                $body
            }
            _ if <$format>::MAX_LEVELS >= 6 => {
                type $level = L<5>;
                $body
            }
            _ if <$format>::MAX_LEVELS == 5 => {
                type $level = L<4>;
                $body
            }
            _ if <$format>::MAX_LEVELS == 4 => {
                type $level = L<3>;
                $body
            }
            _ if <$format>::MAX_LEVELS == 3 => {
                type $level = L<2>;
                $body
            }
            _ if <$format>::MAX_LEVELS == 2 => {
                type $level = L<1>;
                $body
            }
            _ => {
                type $level = L<0>;
                $body
            }
        }
    }};
}
pub(crate) use at_top;

/// Calls `$body` with `$type` as the type of the level that the number `$level` says.
macro_rules! at_level {
    ($level:expr, $format:ty, $type:ident => $body:expr) => {{
        use $crate::engine::L;
        match $level {
            0 => {
                type $type = L<0>;
                $body
            }
            1 if <$format>::MAX_LEVELS > 1 => {
                type $type = L<1>;
                $body
            }
            2 if <$format>::MAX_LEVELS > 2 => {
                type $type = L<2>;
                $body
            }
            3 if <$format>::MAX_LEVELS > 3 => {
                type $type = L<3>;
                $body
            }
            4 if <$format>::MAX_LEVELS > 4 => {
                type $type = L<4>;
                $body
            }
            _ => {
                type $type = L<5>;
                $body
            }
        }
    }};
}
pub(crate) use at_level;
