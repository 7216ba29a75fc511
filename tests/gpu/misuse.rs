//! The stand-in enforces the driver's rules: each misuse is refused, and is not refused once its rule is switched off.
