package netchaos

import (
	"context"
	"fmt"
	"time"

	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/test/badlink"
)

// scenario is one kind of bad network.
type scenario struct {
	name string
	// about describes the problem in one sentence.
	about string
	// conditions are the link's constant conditions if there is no outage.
	conditions badlink.Conditions
	outage     *outage
}

// outage is a temporary or permanent disruption of the link.
type outage struct {
	begin func(ctx context.Context, s *environment) error
	// lasts is the time until the link is good again. Zero means never, so that the shim must find
	// another way.
	lasts time.Duration
	// compressed outages, and the product's periods, are divided by [Options].Compress.
	compressed bool
}

const (
	slow = 250 * time.Millisecond
	// partition is longer than it takes to notice one.
	partition = 45 * time.Second
	// long is the duration of the longest partition, before compression.
	long = 10 * time.Minute
	// narrow is a bandwidth in bits per second.
	narrow = 1_000_000
)

// good is the baseline for the others.
var good = scenario{name: "good", about: "nothing is bad"}

func scenarios() []scenario {
	steady := func(name, about string, conditions badlink.Conditions) scenario {
		return scenario{name: name, about: about, conditions: conditions}
	}
	during := func(name, about string, conditions badlink.Conditions, lasts time.Duration) scenario {
		return scenario{name: name, about: about, outage: &outage{
			begin: func(_ context.Context, s *environment) error { return s.link.Set(conditions) }, lasts: lasts, compressed: lasts == long,
		}}
	}
	all := []scenario{good}
	for _, rtt := range []time.Duration{time.Millisecond, 50 * time.Millisecond, slow} {
		all = append(all, steady(fmt.Sprintf("RTT %d ms", rtt.Milliseconds()), "the agents are far away", badlink.Conditions{RTT: rtt}))
	}
	for _, loss := range []float64{1, 10} {
		all = append(all, steady(fmt.Sprintf("loss %.0f %%", loss), "packets are lost, in both directions", badlink.Conditions{Loss: loss}))
	}
	all = append(all,
		steady("1 Mbit/s", "the link is narrow", badlink.Conditions{Rate: narrow}),
		steady("all of it", "far away, narrow, and packets are lost", badlink.Conditions{RTT: slow, Loss: 1, Rate: narrow}),
	)
	for _, lasts := range []time.Duration{time.Second, 30 * time.Second, partition, long} {
		all = append(all, during("partition "+short(lasts), "nothing passes", badlink.Down, lasts))
	}
	return append(all,
		during("requests lost "+short(partition), "the agents hear nothing, and are heard", badlink.Conditions{Mute: true}, partition),
		during("answers lost "+short(partition), "the agents hear everything, and are not heard", badlink.Conditions{Deaf: true}, partition),
		scenario{name: "half-open", about: "a gateway forgets the connection; neither end is told, and new ones pass", outage: &outage{
			begin: func(_ context.Context, s *environment) error { return s.link.Forget() },
		}},
		scenario{name: "another address", about: "the agents' name leads to another address, and the former one is silent", outage: &outage{
			begin: func(_ context.Context, s *environment) error { return s.moveAgents() },
		}},
	)
}

// short formats a duration for the names of scenarios.
func short(d time.Duration) string {
	return lo.Ternary(d < time.Minute, fmt.Sprintf("%.0f s", d.Seconds()), fmt.Sprintf("%.0f min", d.Minutes()))
}
