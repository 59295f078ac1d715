package cm

import (
	// The built-in providers register themselves with internal/verbs.
	_ "github.com/rdmanet/rdmanet/internal/iwarp"
	_ "github.com/rdmanet/rdmanet/internal/rdmacore"
)
