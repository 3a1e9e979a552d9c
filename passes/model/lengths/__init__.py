"""Sequences whose length the ranks do not divide, in the program for many lengths.

Note [Padded lengths]
N ranks share S tokens in equal parts if N divides S, and a symbol for S needs equal
parts. If N does not divide S, the inputs are padded to the next multiple P of N before
the program runs, by repeating their last token, and results are cut after the first S
tokens: the program is one of P tokens (`frontend/padding/`). Its numbers are those of S
tokens if nothing that is read of the first S tokens depends on the others. That is
proved call by call, from the inputs to the results (`token_reader.py`). Most calls
treat every token by itself, which their flow proves (Note [One rank per entry]). Where
tokens meet, the padding is hidden (`reductions.py`, `positions.py`):

    cross_entropy(logits, labels)       labels of the padding become ignore_index
    sum, mean and losses                what is added up is 0 in the padding
    max, softmax                        what is compared is -inf in the padding
    x / x.shape[1]                      S in place of P
    attention that is not causal        its keys in the padding get segment id -1
    x[:, -1]                            the last token before the padding

A call that is not known to be right is refused, and the graph is compiled for its
length alone. Gradients are right with the results: the gradient of the padding is 0,
because nothing that is read depends on it, and numbers in the padding are finite where
those of the last token are.
"""
