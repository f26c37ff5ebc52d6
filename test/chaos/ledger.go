package chaos

import (
	"encoding/json"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// waiting returns the number of claims without a Machine in a ledger.
func waiting(text string) int {
	var l struct {
		Pending map[string]json.RawMessage `json:"pending"`
	}
	_ = json.Unmarshal([]byte(text), &l)
	return len(l.Pending)
}

// inFlight returns the maximum number of machines that only the ledger knows not to be the user's.
func inFlight(text string) int32 {
	var l struct {
		Spare     int32                         `json:"spare"`
		Pending   map[string]json.RawMessage    `json:"pending"`
		Releasing map[types.UID]json.RawMessage `json:"releasing"`
	}
	if json.Unmarshal([]byte(text), &l) != nil {
		return 0
	}
	return l.Spare + int32(len(l.Pending)) + int32(len(l.Releasing))
}

// uidIn returns the UID in the preconditions of a deletion, or "".
func uidIn(body []byte) types.UID {
	var o metav1.DeleteOptions
	if json.Unmarshal(body, &o) != nil || o.Preconditions == nil || o.Preconditions.UID == nil {
		return ""
	}
	return *o.Preconditions.UID
}
