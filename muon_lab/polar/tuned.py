"""Schedules for products with MXFP8 operands (E4M3, block 32, scales rounded up), found by measurement.

Each was refined by `tuning.refine` on a family of matrices, and is judged on others in ``experiments/mxfp8_designs``:
`mxfp8_flat` on Gaussian matrices two to four times as wide as high, `mxfp8_graded` on log-spaced spectra of condition
100, `mxfp8_gradient` on momenta of the small GPT. Where they differ from published ones: they lift slowly, so that what
rounding adds stays below the repelling fixed point, and their last steps contract.
"""

from collections.abc import Mapping

Rows = tuple[tuple[float, float, float], ...]

#: Coefficients by name and number of steps.
TABLES: Mapping[str, Mapping[int, Rows]] = {
    "mxfp8_flat": {
        5: (
            (5.6304, -10.4914, 5.4000),
            (2.2648, -1.1651, 0.1875),
            (1.6622, -0.8659, 0.1614),
            (1.4821, -0.7670, 0.1495),
            (1.9676, -1.2475, 0.3747),
        ),
        6: (
            (2.0307, -1.2211, 0.3761),
            (1.8839, -1.2663, 0.3752),
            (1.9878, -1.2708, 0.3791),
            (1.8726, -1.2655, 0.3724),
            (1.8198, -1.3224, 0.3673),
            (1.8915, -1.2456, 0.3747),
        ),
        8: (
            (5.5469, -10.5191, 5.4104),
            (2.0885, -1.1717, 0.1796),
            (1.6511, -0.8128, 0.1621),
            (1.4836, -0.7352, 0.1522),
            (1.5505, -0.7132, 0.1475),
            (1.4530, -0.7465, 0.1462),
            (1.4321, -0.7305, 0.1497),
            (1.9587, -1.1644, 0.3827),
        ),
    },
    "mxfp8_graded": {
        5: (
            (7.6391, -14.5301, 7.0345),
            (3.4682, -1.7075, 0.2345),
            (3.1013, -1.4439, 0.2169),
            (2.1251, -1.0902, 0.1792),
            (2.0019, -1.3925, 0.4004),
        ),
        6: (
            (3.2693, -7.7287, 4.8429),
            (2.6508, -5.4994, 3.0971),
            (3.1854, -6.2238, 3.3800),
            (3.3286, -5.7305, 3.3733),
            (2.4489, -2.9249, 1.2508),
            (1.9704, -1.6739, 0.6190),
        ),
        8: (
            (6.3185, -15.8740, 10.3222),
            (2.4301, -1.5281, 0.3434),
            (1.8895, -1.1301, 0.3097),
            (1.7697, -1.0907, 0.2919),
            (1.8208, -1.0637, 0.2985),
            (1.7610, -1.1155, 0.2905),
            (1.6985, -1.1149, 0.2941),
            (1.8715, -1.2411, 0.3653),
        ),
    },
    "mxfp8_gradient": {
        5: (
            (4.1310, -6.8585, 2.9203),
            (3.9715, -6.2620, 2.6425),
            (3.8126, -5.5956, 2.3095),
            (2.9087, -3.2159, 1.1415),
            (2.8644, -3.0920, 1.2255),
        ),
        6: (
            (3.9924, -8.2108, 5.0292),
            (3.6617, -6.3863, 3.3123),
            (3.6405, -6.2702, 3.2076),
            (3.9134, -6.1640, 2.9570),
            (2.6497, -3.0335, 1.1122),
            (2.0071, -1.8201, 0.6728),
        ),
        8: (
            (8.0887, -21.4116, 14.3447),
            (3.8790, -2.5829, 0.4506),
            (3.4598, -2.2952, 0.4223),
            (2.5149, -1.6538, 0.3338),
            (1.8953, -1.1476, 0.3020),
            (1.7986, -1.0952, 0.2917),
            (1.7568, -1.0935, 0.2927),
            (1.8768, -1.2579, 0.3706),
        ),
    },
}

#: Normalised singular values that each is made for.
INTERVALS: Mapping[str, tuple[float, float]] = {
    "mxfp8_flat": (2e-2, 1.0),
    "mxfp8_graded": (4e-3, 1.0),
    "mxfp8_gradient": (2e-3, 1.0),
}

SOURCES: Mapping[str, str] = {
    "mxfp8_flat": "muon_lab.polar.tuning on Gaussian matrices with MXFP8 operands",
    "mxfp8_graded": "muon_lab.polar.tuning on log-spaced spectra of condition 100 with MXFP8 operands",
    "mxfp8_gradient": "muon_lab.polar.tuning on momenta of the small GPT with MXFP8 operands",
}
