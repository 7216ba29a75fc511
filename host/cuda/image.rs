//! Kernel images of users: what they are, and whether all of it is there. The driver is given an address and no length, and
//! would read past the end of an image that was cut short.

use cust::error::CudaResult;
use cust::module::Module;

/// Why an image is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ImageError {
    /// Neither of the three.
    #[error("is no fatbin, cubin or PTX ({bytes} bytes, which start with {start:02x?})")]
    Unknown {
        /// Its length.
        bytes: usize,
        /// Its first bytes, zeroes where there are none.
        start: [u8; 4],
    },
    /// Its end is missing.
    #[error("is a {kind} of {needs} bytes of which {has} are there")]
    CutShort {
        /// What it is.
        kind: &'static str,
        /// How many bytes it says that it has.
        needs: u64,
        /// How many were given.
        has: usize,
    },
    /// The header contradicts itself.
    #[error("is a {kind} with a header that makes no sense")]
    BadHeader {
        /// What it is.
        kind: &'static str,
    },
}

/// A whole image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Image<'a> {
    /// Machine code for several GPUs, and perhaps PTX.
    Fatbin(&'a [u8]),
    /// Machine code for one.
    Cubin(&'a [u8]),
    /// Assembly, which the driver translates.
    Ptx(&'a str),
}

const FATBIN_MAGIC: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
const ELF_MAGIC: [u8; 4] = *b"\x7fELF";
/// A 64-bit, little-endian ELF file.
const ELF_64_LE: [u8; 2] = [2, 1];
const ELF_MACHINE_CUDA: u64 = 190;
const ELF_SECTION_HEADER_BYTES: u64 = 64;
/// A section that takes no bytes of the file.
const ELF_NOBITS: u64 = 8;

impl<'a> Image<'a> {
    /// Looks at the header, and whether the image is as long as it says.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ImageError> {
        match bytes.first_chunk() {
            Some(&FATBIN_MAGIC) => check_length("fatbin", bytes, fatbin_bytes).map(|()| Self::Fatbin(bytes)),
            Some(&ELF_MAGIC) => check_length("cubin", bytes, cubin_bytes).map(|()| Self::Cubin(bytes)),
            _ => ptx(bytes).map(Self::Ptx).ok_or_else(|| {
                let mut start = [0; 4];
                start.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
                ImageError::Unknown { bytes: bytes.len(), start }
            }),
        }
    }

    /// Hands it to the driver.
    ///
    /// # Errors
    /// The driver's.
    pub fn load(self) -> CudaResult<Module> {
        match self {
            Self::Fatbin(bytes) => Module::from_fatbin(bytes, &[]),
            Self::Cubin(bytes) => Module::from_cubin(bytes, &[]),
            Self::Ptx(text) => Module::from_ptx(text, &[]),
        }
    }
}

/// How long an image says that it is: `Err` when it ends before it has said so, `None` when it makes no sense.
type Length = Option<Result<u64, u64>>;

fn check_length(
    kind: &'static str,
    bytes: &[u8],
    length: impl Fn(&[u8]) -> Length,
) -> Result<(), ImageError> {
    let needs = match length(bytes).ok_or(ImageError::BadHeader { kind })? {
        Ok(needs) | Err(needs) => needs,
    };
    let has = bytes.len();
    if needs <= has as u64 { Ok(()) } else { Err(ImageError::CutShort { kind, needs, has }) }
}

/// A little-endian number of `size` bytes; `Err` has how long the image must at least be.
fn number(bytes: &[u8], at: u64, size: u64) -> Option<Result<u64, u64>> {
    let end = at.checked_add(size)?;
    let field = usize::try_from(at).ok().and_then(|at| bytes.get(at..)?.get(..size as usize));
    let value = |field: &[u8]| field.iter().rev().fold(0, |value, &b| value << 8 | u64::from(b));
    Some(field.map(value).ok_or(end))
}

/// A number of the header, or the end of the function that asks for it.
macro_rules! field {
    ($bytes:expr, $at:expr, $size:expr) => {
        match number($bytes, $at, $size)? {
            Ok(value) => value,
            Err(end) => return Some(Err(end)),
        }
    };
}

/// Magic, version, bytes of the header, bytes behind it.
fn fatbin_bytes(bytes: &[u8]) -> Length {
    let (header, rest) = (field!(bytes, 6, 2), field!(bytes, 8, 8));
    if header < 16 {
        return None;
    }
    Some(Ok(header.checked_add(rest)?))
}

/// To the end of the table of sections, and of each section.
fn cubin_bytes(bytes: &[u8]) -> Length {
    let (class, machine) = (field!(bytes, 4, 2), field!(bytes, 18, 2));
    if class != u64::from(u16::from_le_bytes(ELF_64_LE)) || machine != ELF_MACHINE_CUDA {
        return None;
    }
    let (table, size, count) = (field!(bytes, 40, 8), field!(bytes, 58, 2), field!(bytes, 60, 2));
    if size != ELF_SECTION_HEADER_BYTES || count == 0 {
        return None;
    }
    let mut end = table.checked_add(size * count)?;
    for at in (0..count).map(|i| i * size) {
        let at = table.checked_add(at)?;
        let (kind, offset, bytes) =
            (field!(bytes, at + 4, 4), field!(bytes, at + 24, 8), field!(bytes, at + 32, 8));
        if kind != ELF_NOBITS {
            end = end.max(offset.checked_add(bytes)?);
        }
    }
    Some(Ok(end))
}

/// Text that says for which version and GPU it is; a zero may end it, as in C.
fn ptx(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes.strip_suffix(b"\0").unwrap_or(bytes)).ok()?;
    let is_ptx = text.contains(".version") && text.contains(".target") && !text.contains('\0');
    is_ptx.then_some(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What nvcc made of the library's own kernels.
    const FATBIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/put.fatbin"));

    /// A cubin of one section, as short as one can be.
    fn cubin() -> Vec<u8> {
        let mut bytes = vec![0; 64 + 64 + 10];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[18] = 190;
        bytes[40] = 64;
        bytes[58] = 64;
        bytes[60] = 1;
        bytes[64 + 4] = 1;
        bytes[64 + 24] = 128;
        bytes[64 + 32] = 10;
        bytes
    }

    #[test]
    fn each_kind_is_known() {
        assert_eq!(Image::parse(FATBIN), Ok(Image::Fatbin(FATBIN)));
        let cubin = cubin();
        assert_eq!(Image::parse(&cubin), Ok(Image::Cubin(&cubin)));
        let ptx = "// made by nvcc\n.version 9.0\n.target sm_90\n";
        assert_eq!(Image::parse(ptx.as_bytes()), Ok(Image::Ptx(ptx)));
        assert_eq!(Image::parse(format!("{ptx}\0").as_bytes()), Ok(Image::Ptx(ptx)));
    }

    #[test]
    fn what_is_no_image_is_named() {
        for bytes in
            [&b""[..], b"\0\0\0\0", b"hello", b".version 9.0", b".version\0.target", b"\xff.version.target"]
        {
            assert!(matches!(Image::parse(bytes), Err(ImageError::Unknown { .. })), "{bytes:?}");
        }
        let error = Image::parse(b"MZ\x90\0").unwrap_err().to_string();
        assert_eq!(error, "is no fatbin, cubin or PTX (4 bytes, which start with [4d, 5a, 90, 00])");
    }

    #[test]
    fn a_library_of_the_host_is_no_cubin() {
        let mut library = cubin();
        library[18] = 62;
        assert_eq!(Image::parse(&library), Err(ImageError::BadHeader { kind: "cubin" }));
    }

    #[test]
    fn numbers_that_overflow_are_no_header() {
        let mut far = cubin();
        far[64 + 24..64 + 40].fill(0xff);
        assert_eq!(Image::parse(&far), Err(ImageError::BadHeader { kind: "cubin" }));
        far[40..48].fill(0xff);
        assert!(Image::parse(&far).is_err());
    }

    proptest! {
        /// Wherever it is cut, the driver never sees it.
        #[test]
        fn an_image_that_is_cut_short_is_refused(part in 0.0..1.0f64) {
            for whole in [FATBIN, &cubin()] {
                let cut = &whole[..(whole.len() as f64 * part) as usize];
                prop_assert!(Image::parse(cut).is_err(), "{} of {} bytes", cut.len(), whole.len());
            }
        }

        #[test]
        fn no_bytes_make_it_panic(mut bytes: Vec<u8>, kind in 0..3usize) {
            let header = [FATBIN_MAGIC, ELF_MAGIC, *b".ver"][kind];
            bytes.splice(..0, header);
            let _ = Image::parse(&bytes);
        }

        #[test]
        fn no_change_of_a_cubin_makes_it_panic(at in 0..128usize, to: u8) {
            let mut bytes = cubin();
            bytes[at] = to;
            let _ = Image::parse(&bytes);
        }
    }
}
